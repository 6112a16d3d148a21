"""The policies: which generation a restore tries, which may be deleted, and when a save is due. No disk and no
clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from histories import History, at, generation
from lastgood.errors import ManifestInvalid, NoSuchStep, Refused
from lastgood.format.commit import Survey
from lastgood.policy.cadence import Every
from lastgood.policy.restore import choose, lineage, never_good
from lastgood.policy.retention import Keep, stale_incarnations, surplus, unverified_ahead, wanted, wanted_after
from lastgood.records import Finding, Generation, GenerationId, Incarnation, Pointer

DAMAGE = [Finding(kind="SumMismatch", what="chunk 3 differs")]


@st.composite
def histories(draw) -> History:
    """Histories of openings from scratch, continuations and rewinds, with some generations deleted and some commits
    broken."""
    past = History()
    for _ in range(draw(st.integers(1, 6))):
        known = [None, *past.before]
        opened = past.open(draw(st.sampled_from(known)))
        step = 0
        for _ in range(draw(st.integers(0, 4))):
            step += draw(st.integers(1, 10))
            past.save(step, opened)
    for one in list(past.before):
        fate = draw(st.sampled_from(["stays", "stays", "stays", "retired", "broken", "damaged"]))
        if fate == "retired":
            del past.survey.generations[one]
        elif fate == "broken":
            del past.survey.generations[one]
            past.survey.broken[one] = ManifestInvalid("its commit cannot be read.")
        elif fate == "damaged":
            past.survey.generations[one] = generation(
                one.step, one.incarnation, past.survey.incarnations[one.incarnation].order, damaged=DAMAGE
            )
    return past


# ---- lineage ---------------------------------------------------------------------------------------------------


@given(histories())
def test_the_lineage_is_exactly_the_ancestors_of_the_newest_state(past):
    chain, lost = lineage(past.survey)
    assert chain == past.descent()
    assert lost == []


@given(histories())
def test_a_restore_tries_the_whole_lineage_newest_first_and_nothing_else(past):
    candidates, passed_over = choose(past.survey, None)
    descent = past.descent()
    good = [one for one in descent if one in past.survey.generations and not past.survey.generations[one].damaged]
    assert candidates == good
    assert {one for one, _ in passed_over} == set(descent) - set(good)
    assert all(reason in ("its commit cannot be read.", "chunk 3 differs") for _, reason in passed_over)


def test_after_a_rewind_restore_never_selects_an_abandoned_step():
    past = History()
    first = past.open(None)
    for step in (1000, 2000, 5000):
        past.save(step, first, verified=True)
    past.open(at(2000, first))
    assert choose(past.survey, None).candidates == [at(2000, first), at(1000, first)]
    again = past.open(at(2000, first))
    past.save(3000, again)
    assert choose(past.survey, None).candidates == [at(3000, again), at(2000, first), at(1000, first)]
    assert choose(past.survey, 5000).candidates == [at(5000, first)], "it can still be restored by its number"


def test_starting_over_abandons_every_generation():
    past = History()
    past.save(10, past.open(None))
    past.open(None)
    assert choose(past.survey, None) == ([], [])


def test_the_same_step_in_two_incarnations_is_two_generations():
    past = History()
    first = past.open(None)
    past.save(10, first)
    past.save(20, first)
    second = past.open(at(10, first))
    past.save(20, second)
    assert choose(past.survey, None).candidates == [at(20, second), at(10, first)]
    assert choose(past.survey, 20).candidates == [at(20, second)], "the abandoned generation must not replace it"


def test_a_lost_commit_is_reported_for_every_record_that_names_it():
    names = {
        "the next commit": [generation(30, parent=at(20))],
        "the next incarnation": [],
        "the pointer": [],
    }
    for named_by, generations in names.items():
        survey = Survey(incomplete={at(20)})
        survey.generations = {one.id: one for one in [generation(10), *generations]}
        survey.incarnations = {"a": Incarnation(format=1, order=1, id="a", parent=None)}
        if named_by == "the next incarnation":
            survey.incarnations["b"] = Incarnation(format=1, order=2, id="b", parent=at(20))
        if named_by == "the pointer":
            survey.pointer = Pointer(format=1, step=20, incarnation="a", root="")
        assert lineage(survey).lost == [at(20)], named_by
        candidates, passed_over = choose(survey, None)
        assert passed_over == [(at(20), "its COMMIT is gone")], named_by
        assert candidates == sorted(survey.generations, reverse=True), named_by


def test_deleted_and_unfinished_generations_are_not_reported_as_lost():
    survey = Survey(going={at(10)}, incomplete={at(40)})  # the folder of step 20 is missing too
    survey.generations = {at(30): generation(30, parent=at(20)), at(20, "x"): generation(20, "x")}
    survey.incarnations = {"a": Incarnation(format=1, order=1, id="a", parent=at(10))}
    assert lineage(survey).lost == []


def test_a_cycle_of_forged_parents_terminates():
    survey = Survey()
    for order, (one, parent) in enumerate([("a", "c"), ("b", "a"), ("c", "b"), ("d", "d")], 1):
        survey.incarnations[one] = Incarnation(format=1, order=order, id=one, parent=at(99, parent))
        survey.generations[at(order, one)] = generation(order, one, order)
    assert lineage(survey).chain == [at(4, "d")]
    del survey.incarnations["d"], survey.generations[at(4, "d")]
    assert lineage(survey).chain == [at(3, "c"), at(2, "b"), at(1, "a")]
    assert stale_incarnations(survey) == []


def test_a_broken_generation_of_an_unrecorded_incarnation_is_reported():
    survey = Survey(broken={at(20, "b"): ManifestInvalid("its commit cannot be read.")})
    survey.generations = {at(10): generation(10)}
    survey.incarnations = {"a": Incarnation(format=1, order=1, id="a", parent=None)}
    assert choose(survey, None) == ([at(10)], [(at(20, "b"), "its commit cannot be read.")])


def test_training_starts_over_only_if_all_of_the_lineage_is_there_and_bad():
    survey = Survey(generations={at(10): generation(10)})
    survey.incarnations = {"a": Incarnation(format=1, order=1, id="a", parent=None)}
    assert never_good(survey, {at(10), at(20)})
    assert not never_good(survey, set()) and not never_good(Survey(), {at(10)})
    survey.broken = {at(20): ManifestInvalid("its commit cannot be read.")}
    assert not never_good(survey, {at(10), at(20)})
    survey.broken, survey.incomplete = {}, {at(20)}
    survey.pointer = Pointer(format=1, step=20, incarnation="a", root="")
    assert not never_good(survey, {at(10), at(20)}), "its commit is lost"


def test_a_run_without_a_commit_has_no_candidates():
    assert choose(Survey(), None) == ([], [])


# ---- a restore by step number ----------------------------------------------------------------------------------


def test_a_requested_step_that_is_missing_is_refused_with_the_existing():
    survey = Survey(generations={one.id: one for one in (generation(20), generation(10))})
    with pytest.raises(NoSuchStep, match=r"Steps that are there: 10, 20\."):
        choose(survey, 30)
    with pytest.raises(NoSuchStep, match=r"Steps that are there: none\."):
        choose(Survey(), 0)


@given(histories(), st.integers(0, 40))
def test_a_step_number_selects_an_abandoned_generation_only_if_it_is_alone(past, step):
    generations = {one for one in past.survey.generations if one.step == step}
    try:
        candidates, passed_over = choose(past.survey, step)
    except NoSuchStep:
        assert not generations
        return
    of_lineage = [one for one in lineage(past.survey).chain if one.step == step]
    assert passed_over == [] and (candidates == of_lineage or (not of_lineage and len(candidates) == 1))
    assert {one.step for one in candidates} == {step}


# ---- retention -------------------------------------------------------------------------------------------------

keeps = st.builds(
    Keep,
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 6),
    milestones=st.lists(st.integers(1, 40), max_size=2).map(tuple),
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)
losses = st.sampled_from([{}, {"loss": 1.0}, {"loss": 0.5}, {"loss": math.nan}, {"loss": -math.inf}, {"other": 0.0}])


@st.composite
def chains(draw, incarnation: str = "a", order: int = 1) -> list[Generation]:
    """Lineages, newest generation first."""
    steps = sorted(draw(st.sets(st.integers(1, 40), max_size=10)), reverse=True)
    return [
        generation(
            step,
            incarnation,
            order,
            verified=draw(st.booleans()),
            damaged=draw(st.sampled_from([[], [], [], DAMAGE])),
            milestone=draw(st.integers(0, 5)) == 0,
            metrics=draw(losses),
        )
        for step in steps
    ]


def first_ones(keep: Keep, chain: list[Generation]) -> set[GenerationId]:
    """Of each `every` steps, and from each milestone on, the oldest that may be restored; steps are up to 40."""
    fit = [one for one in reversed(chain) if one.restorable]
    multiples = range(keep.every, 41, keep.every) if keep.every else ()
    found = [next((one for one in fit if step <= one.step < step + keep.every), None) for step in multiples]
    found += [next((one for one in fit if one.step >= step), None) for step in keep.milestones]
    return {one.id for one in found if one is not None}


def pinned(keep: Keep, one: Generation) -> bool:
    return bool(one.commit.milestone or one.step in keep.milestones or (keep.every and one.step % keep.every == 0))


@given(keeps, chains("b", 2), chains("a", 1))
def test_retention_keeps_every_generation_of_its_policy(keep, chain, abandoned):
    going = surplus(keep, chain, abandoned)
    assert going == sorted(set(going)), "generations are deleted oldest first, each once"
    good = [one for one in chain if one.verified and not one.damaged]
    kept = {one.id for one in (*chain, *abandoned)} - set(going)
    assert all(one.id in kept for one in chain[:1]), "the newest committed generation stays"
    assert all(one.id in kept for one in good[: keep.last]), "the newest verified generations stay"
    assert all(one.id in kept for one in (*chain, *abandoned) if one.damaged), (
        "a damaged generation is evidence and is never deleted"
    )
    assert all(one.id in kept for one in chain if pinned(keep, one)), (
        "milestones and every n-th stay, whether verified or not"
    )
    assert first_ones(keep, chain) <= kept, "the first one of each n steps stays"
    assert all(one.id in kept for one in abandoned if pinned(keep, one))
    assert all(one.id in kept for one in chain[: unverified_ahead(chain)]), (
        "no generation newer than the newest verified one is deleted"
    )
    if keep.best:
        sign = 1 if keep.best[1] == "min" else -1
        scored = sorted(sign * loss for one in good if math.isfinite(loss := one.commit.metrics.get("loss", math.nan)))
        held = sorted(
            sign * one.commit.metrics["loss"]
            for one in good
            if one.id in kept and math.isfinite(one.commit.metrics.get("loss", math.nan))
        )
        assert held[: keep.best[2]] == scored[: keep.best[2]], "the best generations stay"


def test_an_explicit_save_stays_although_a_newer_one_is_verified():
    """Found by the crash model: a power loss destroyed the mark of a verified `every`-th step, which was then
    deleted as an unverified one. Verification may also skip such a step where saves follow each other fast."""
    newest = generation(30, verified=True, metrics={"loss": 9.0})
    row = [newest, generation(20, metrics={"loss": 1.0}), generation(10, milestone=True), generation(8)]
    assert surplus(Keep(last=1, every=20), row, []) == [at(8)]
    assert surplus(Keep(last=1, best=("loss", "min", 1)), row, []) == [at(8)]
    assert surplus(Keep(last=1), row, []) == [at(8), at(20)]


UNFIT = [Finding(kind="NotFinite", what="w holds NaN")]


def left(keep: Keep, *row: Generation) -> set[int]:
    return {one.step for one in row} - {one.step for one in surplus(keep, row, [])}


def test_the_first_generation_after_each_multiple_stays():
    """With a cadence in seconds, or with steps that count samples, no save hit a multiple of `every`: a run of weeks
    with Keep(last=3, every=1000) had three generations, and `gc --keep-every` deleted all but the newest."""
    row = [generation(step, verified=True) for step in (48, 44, 39, 26, 22, 13, 12, 8)]
    assert left(Keep(last=1, every=10), *row[:1], *row[2:4], *row[5:6]) == {13, 26, 39, 48}
    assert left(Keep(last=1, every=10), *row) == {12, 22, 39, 44, 48}
    assert left(Keep(last=1, every=100), *row) == {48}


def test_the_first_generation_after_a_milestone_stays():
    row = [generation(step, verified=True) for step in (48, 39, 26, 13)]
    assert left(Keep(last=1, milestones=(20, 27, 60)), *row) == {26, 39, 48}
    assert left(Keep(last=1, milestones=(13, 14, 15)), *row) == {13, 26, 48}


def test_what_is_not_good_stands_for_no_multiple_and_stays_at_one():
    newest, good = generation(48, verified=True), generation(33, verified=True)
    between = [generation(31, unfit=UNFIT), generation(30, unfit=UNFIT), generation(29, verified=True)]
    assert left(Keep(last=1, every=30), newest, good, *between) == {30, 33, 48}
    assert left(Keep(last=1, milestones=(30,)), newest, good, *between) == {30, 33, 48}
    damaged = generation(31, damaged=DAMAGE)
    assert left(Keep(last=1, every=30), newest, good, damaged) == {31, 33, 48}


def test_an_unverified_generation_stands_for_a_multiple():
    row = [generation(48, verified=True), generation(33, verified=True), generation(31)]
    assert left(Keep(last=1, every=30), *row) == {31, 48}


def test_a_save_that_passes_a_multiple_is_wanted_and_the_next_is_not():
    keep = Keep(every=100, milestones=(250,))
    saves = (95, 48), (144, 96), (192, 144), (260, 212), (290, 260), (90, 0)
    assert [step for step, since in saves if wanted(keep, step, False, {}, since)] == [144, 260]
    assert wanted(keep, 200, False, {}, 200) and wanted(keep, 250, False, {}, 250), "a step that is saved again"
    assert wanted(keep, 200, False, {}) and wanted(keep, 250, False, {}) and not wanted(keep, 201, False, {})
    assert wanted_after(keep, generation(144, parent=at(96)).commit) and wanted_after(keep, generation(144).commit)
    assert not wanted_after(keep, generation(144, parent=at(101)).commit)


@given(keeps, chains("b", 2), chains("a", 1))
def test_an_unverified_generation_causes_no_deletion(keep, chain, abandoned):
    unread = [generation(one.step, one.id.incarnation, one.commit.order) for one in chain]
    assert surplus(keep, unread, abandoned) == []
    damaged = [generation(one.step, one.id.incarnation, 2, verified=True, damaged=DAMAGE) for one in chain]
    assert surplus(keep, damaged, abandoned) == []


@given(keeps, chains("b", 2), chains("a", 1))
def test_retention_is_bounded_and_idempotent(keep, chain, abandoned):
    going = set(surplus(keep, chain, abandoned))
    remaining = [one for one in chain if one.id not in going]
    assert surplus(keep, remaining, [one for one in abandoned if one.id not in going]) == []
    older = [one for one in remaining[unverified_ahead(remaining) :] if not one.damaged and not pinned(keep, one)]
    older = [one for one in older if one.id not in first_ones(keep, chain)]
    assert len(older) <= keep.last + (2 * keep.best[2] if keep.best else 0)


@given(keeps, chains("b", 2))
def test_what_was_kept_as_the_first_stays_as_the_run_grows(keep, chain):
    """Retention is applied after each save to what it has left."""
    held: list[Generation] = []
    stays: set[GenerationId] = set()
    for one in reversed(chain):
        held = [one, *held]
        stays |= first_ones(keep, held)
        going = set(surplus(keep, held, []))
        held = [other for other in held if other.id not in going]
        assert stays <= {other.id for other in held}
    assert first_ones(keep, held) == first_ones(keep, chain) == stays


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 40))
def test_saves_that_hit_the_multiples_are_kept_for_them_alone(last, every, count):
    row = [generation(step, verified=True) for step in range(count, 0, -1)]
    kept = {one.step for one in row} - {one.step for one in surplus(Keep(last=last, every=every), row, [])}
    assert kept == {*range(every, count + 1, every), *range(max(count - last, 0) + 1, count + 1)}


@given(keeps, chains("b", 2), chains("a", 1))
def test_abandoned_generations_stay_until_the_new_lineage_has_enough(keep, chain, abandoned):
    good = [one for one in chain if one.verified and not one.damaged]
    going = set(surplus(keep, chain, abandoned))
    free = {one.id for one in abandoned if not one.damaged and not pinned(keep, one)}
    assert going & {one.id for one in abandoned} == (free if len(good) >= keep.last else set())


def test_only_commits_after_a_rewind_count_against_abandoned_generations():
    """Generations that both lineages share do not show whether the new lineage has enough generations of its own."""
    shared = [generation(step, "a", 1, verified=True) for step in (20, 10)]
    abandoned = [generation(30, "a", 1, verified=True)]
    newer = [generation(25, "b", 2, verified=True)]
    assert surplus(Keep(last=2), [*newer, *shared], abandoned) == [at(10)]
    assert surplus(Keep(last=1), [*newer, *shared], abandoned) == [at(10), at(20), at(30)]


@pytest.mark.parametrize(
    "bad", [{"last": 0}, {"last": -1}, {"every": 0}, {"best": ("loss", "least", 1)}, {"best": ("loss", "min", 0)}]
)
def test_a_policy_that_keeps_nothing_is_refused(bad):
    with pytest.raises(Refused):
        Keep(**bad)


def test_the_backlog_counts_what_is_newer_than_the_newest_verified():
    rows = [generation(step, verified=step in (10, 20), damaged=DAMAGE if step == 20 else []) for step in (30, 20, 10)]
    assert unverified_ahead(rows) == 2, "a damaged generation no longer counts as verified"
    assert unverified_ahead(rows[:2]) == 2 and unverified_ahead([]) == 0
    assert unverified_ahead([generation(5, verified=True), *rows]) == 0


# ---- incarnations ----------------------------------------------------------------------------------------------


@given(histories())
def test_deleting_stale_incarnations_keeps_the_lineage(past):
    survey, before = past.survey, lineage(past.survey)
    newest = max(survey.incarnations.values(), key=lambda one: one.order)
    stale = stale_incarnations(survey)
    assert newest not in stale
    assert not {one.id for one in stale} & {one.incarnation for one in (*survey.generations, *survey.broken)}
    for one in stale:
        del survey.incarnations[one.id]
    assert lineage(survey) == before
    assert stale_incarnations(survey) == []


def test_openings_without_a_save_do_not_accumulate():
    past = History()
    saved = past.save(10, past.open(None))
    for _ in range(20):
        past.open(saved)
    assert [one.id for one in stale_incarnations(past.survey)] == [f"i{n}" for n in range(1, 20)]


def test_an_incarnation_with_an_incomplete_folder_is_not_stale():
    past = History()
    names = [past.open(None) for _ in range(4)]
    past.survey.incomplete.add(at(1, names[0]))
    past.survey.going.add(at(1, names[1]))
    assert [one.id for one in stale_incarnations(past.survey)] == [names[2]]


# ---- cadence ---------------------------------------------------------------------------------------------------


def test_a_save_is_due_after_the_configured_steps_or_seconds():
    assert [step for step in range(1, 10) if Every(steps=3).due(step, 1e9)] == [3, 6, 9]
    assert [age for age in (0.0, 59.9, 60.0, 61.0) if Every(seconds=60).due(7, age)] == [60.0, 61.0]
    both = Every(steps=3, seconds=60)
    assert both.due(3, 0.0) and both.due(4, 60.0) and not both.due(4, 59.0)


@pytest.mark.parametrize(
    "nothing",
    [
        {"steps": 0},
        {"steps": -1},
        {"seconds": 0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"steps": 5, "seconds": 0},
    ],
)
def test_a_meaningless_cadence_is_refused(nothing):
    """Zero was once accepted, as if it had not been given: the first step divided by it."""
    with pytest.raises(Refused, match=rf"Every\({[*nothing][-1]}="):
        Every(**nothing)
    with pytest.raises(Refused, match=r"Every\(\) has neither"):
        Every()
