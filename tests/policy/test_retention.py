"""Retention by example, for rare runs. The rules for all runs are in test_plan.py."""

from __future__ import annotations

import pytest

from histories import History, at, generation
from lastgood.errors import TierDown
from lastgood.format.commit import Survey
from lastgood.policy.places import lacking, merged
from lastgood.policy.restore import choose, ends_at, lineage, never_committed, require_read
from lastgood.policy.retention import Keep, lacks_metric, stale_incarnations, surplus
from lastgood.records import Finding, Incarnation


def test_the_newest_unverified_generations_fill_up_missing_verified_ones():
    """Verification has fallen behind: one generation is verified, and three were promised."""
    row = [generation(50, verified=True), *(generation(step) for step in (40, 30, 20, 10))]
    assert surplus(Keep(last=3), row, []) == [at(10), at(20)]
    assert surplus(Keep(last=1), row, []) == [at(10), at(20), at(30), at(40)]


def test_the_best_verified_generation_stays_beside_a_better_unverified_one():
    row = [
        generation(40, verified=True, metrics={"loss": 9.0}),
        generation(30, metrics={"loss": 1.0}),
        generation(20, verified=True, metrics={"loss": 2.0}),
        generation(10, verified=True, metrics={"loss": 3.0}),
    ]
    assert surplus(Keep(last=1, best=("loss", "min", 1)), row, []) == [at(10)]


def test_a_step_saved_again_by_a_rerun_counts_once():
    """Each rerun of a finished script saved its last step again, and older steps were deleted for it."""
    again = [generation(30, incarnation, verified=True) for incarnation in "cba"]
    row = [*again, generation(20, verified=True), generation(10, verified=True)]
    assert surplus(Keep(last=2), row, []) == [at(10), at(30, "a"), at(30, "b")]


def test_the_newest_committed_generation_stays_although_it_is_unfit():
    """A newer unfit generation may be deleted, but not the newest one: it shows where the run has diverged."""
    nan = [Finding(kind="NotFinite", what="w holds NaN")]
    row = [generation(30, unfit=nan), generation(20, unfit=nan), generation(10, verified=True)]
    assert surplus(Keep(last=1), row, []) == [at(20)]


def test_an_incarnation_without_saves_stays_while_a_kept_one_needs_it():
    """Step 10 is a milestone of the first opening; everything that the second opening saved was deleted; the third
    continues it. Without the record of the second opening, no reader could trace the lineage from 30 back to 10."""
    past = History()
    first = past.open(None)
    second = past.open(at(10, first))
    third = past.open(at(20, second))
    for step, incarnation in ((10, first), (30, third)):
        past.survey.generations[at(step, incarnation)] = generation(step, incarnation, verified=True)
    assert stale_incarnations(past.survey) == []
    assert lineage(past.survey).chain == [at(30, third), at(10, first)]


def test_a_generation_that_lost_its_commit_is_not_litter():
    """The folder is evidence, because other records name its generation; only a folder that no record names was
    never committed."""
    past = History()
    only = past.open(None)
    past.survey.generations[at(30, only)] = generation(30, only, parent=at(20, only))
    past.survey.incomplete |= {at(20, only), at(31, only)}
    assert never_committed(past.survey) == {at(31, only)}
    assert lineage(past.survey).lost == [at(20, only)]


def test_a_metric_that_never_comes_is_reported_once() -> None:
    """With a typo in the name, every save that was to be kept for its metric was deleted by its age."""
    keep, saves = Keep(last=2, best=("val_loss", "min", 1)), [{"valloss": 1.0}, {}, {"valloss": 2.0}, {}]
    found = [lacks_metric(keep, saves[:count]) for count in (1, 2, 3, 4)]
    assert [bool(one) for one in found] == [False, False, True, False]
    assert "none of the first 3 saves has the metric 'val_loss'" in found[2] and "(these have: valloss)" in found[2]
    assert not lacks_metric(keep, [*saves[:2], {"val_loss": 1.0}])
    assert not lacks_metric(Keep(last=2), saves[:3])


def survey_of(*steps: int) -> Survey:
    """A place that holds these steps of one lineage, all verified."""
    found = Survey(generations={at(step): generation(step, verified=True) for step in steps})
    found.incarnations = {"a": Incarnation(format=1, order=1, id="a", parent=None)}
    return found


def test_a_place_lacks_the_first_generation_after_each_multiple():
    """A place below with Keep(every=1000) received only steps that were multiples: with saves by time, none."""
    front, below, keep = survey_of(990, 1020, 1040, 2010), survey_of(1040), Keep(last=1, every=1000)
    assert [one.step for one in lacking(front, below, merged([front, below]), keep)] == [2010, 1020]
    below = survey_of(1010, 2010)
    assert lacking(front, below, merged([front, below]), keep) == [], "1010 is the first of all places"


def test_a_restore_ends_at_what_cannot_be_read():
    survey = survey_of(10, 20, 30, 40)
    error = TierDown("its folder cannot be listed")
    for step in (20, 40):
        survey.broken = {at(step): error}
        survey.generations = {
            one: kept for one, kept in survey_of(10, 20, 30, 40).generations.items() if one.step != step
        }
        assert choose(survey, None).candidates == ([at(40), at(30)] if step == 20 else []) and ends_at(survey) == at(
            step
        )
    with pytest.raises(TierDown):
        require_read(survey)
    survey.broken = {at(40, "b"): error}
    assert choose(survey, None).candidates == [], "no record names its incarnation, so it may be the newest"


def test_a_copy_that_cannot_be_read_may_be_good():
    """A damaged copy in front was stepped over, although the place below could not be read for a moment."""
    front, below = survey_of(10), survey_of(10)
    front.generations[at(20)] = generation(20, damaged=[Finding(kind="SumMismatch", what="chunk 3 differs")])
    below.broken[at(20)] = TierDown("its COMMIT cannot be opened")
    assert choose(merged([front, below]), None).candidates == []
    front.generations[at(20)] = generation(20, verified=True)
    assert choose(merged([front, below]), None).candidates == [at(20), at(10)]
