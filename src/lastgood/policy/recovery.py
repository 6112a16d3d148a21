"""What a supervisor does when an attempt of a job has ended: start again, differently perhaps, or give up. Pure.

An attempt is one life of all ranks. Attempts count as without progress while they restore the same step and save no
newer one: what was trained in between was lost again. The number of those is bounded; that of attempts with progress is
bounded only if the user says so.

Attempts that fail at the same step with the same cause fail because of the state or of the batches, and not of the
machine. After so many of them the job goes on from the generation before; if it fails there again, without the batches
of that step; if it fails there again, it is given up. A failure before any step is completed may as well come from the
script, and a hang from an evaluation that has no name: then no batches are left out, which would be missing for good.
A full disk, or a store that does not answer, has to do with neither. Nodes that are lost one after the other say
nothing about the program; one that is lost each time does, and so do very many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..units import plural
from .arguments import is_number, is_whole, require

PREEMPTED = 75
"""The exit code of a process that was asked to end and has saved (loop/preemption.py)."""
GAVE_UP = 9
"""The exit code of a job that was given up."""


Act = Literal["end", "restart", "back", "skip"]
"""What follows an attempt: "back" and "skip" are restarts, from an older generation, or without some batches."""
REMEDIES: tuple[Act, ...] = ("back", "skip")
_HOPELESS = re.compile(
    r"(SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError|NameError|Refused|StateMismatch|Unstorable|"
    r"UnknownFormat|NoSuchStep|NotARun|NotWritable|NotRestored|NotInstalled|RunReplaced|NothingGood)\b"
)
"""The errors of a script before its state is restored that come again each time it is started."""
_OF_A_PLACE = re.compile(
    r"(NoSpace|TierDown|PeerDown|TimedOut|CommitUnknown|Cancelled|Overtaken|InFlightFull|NothingDurable)\b|"
    r".*(\[Errno (28|30|122)\]|No space left on device|Disk quota exceeded|Read-only file system|"
    r"iostream error|PytorchStreamWriter failed|unexpected pos \d+ vs \d+|\d+ requested and \d+ written)",
    re.DOTALL,
)
"""The errors of a disk, a store or another node (28: it is full; 30: it is read-only; 122: the quota is used up),
whatever was trained. torch puts that of a DataLoader's worker behind a text and a traceback. The last line has what
torch.save and numpy's tofile say of a short write."""
ASKED = "the job was asked to end"
RUN_MISSING = "the run is not in its place any more, and a restart would begin a new one at step 0"
DIVERGED = "TrainingDiverged"
"""how the error begins with which a Sentinel ends an attempt: it has found the suspects, and left out what it may"""
HANG = "hang"
"""the `cause` of an attempt in which ranks hung"""
NODE = "node"
"""the `cause` of an attempt that ended because a node was lost"""
STORE = "store"
"""the `cause` of an attempt that ended because the store of the nodes was lost, and no node"""
CAUSES = ("exception", "exit", HANG, NODE, "signal", STORE)
"""the kinds of causes: those that have a name begin with one of these, as "signal SIGKILL" """
LOST_NODES = 30
"""so many nodes that are lost in a row count as no failure: a program that ends its node each time gets new ones"""
_MOST_DOUBLINGS = 32
"""of the pause before a restart: a float has an end, and a job with many permitted failures has not"""
USAGE = 2
"""the exit code of argparse for arguments that a script does not take"""


@dataclass(frozen=True)
class Budget:
    """How often a job is started again.

    `restarts`: restarts in all; None: no bound (default). `without_progress`: attempts in a row that restore the same
    step, or fail at the same step with the same cause, the first included (default 3). `remedies`: what is tried then,
    in this order, before the job is given up (default: "back", "skip"). `of_causes`: cause -> restarts after failures
    of this cause, in all (default: no bound); a kind of `CAUSES`, the name of a signal, or that of an exception.
    `pause_seconds`: before the first restart without progress (default 1.0), then doubled each time up to
    `longest_pause_seconds` (default 60.0). Raises Refused for values that cannot be meant.

        Budget(of_causes={"OutOfMemoryError": 1, "hang": 5})  # and no bound for lost nodes
    """

    restarts: int | None = None
    without_progress: int = 3
    remedies: tuple[Act, ...] = REMEDIES
    of_causes: Mapping[str, int] = field(default_factory=dict)
    pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0

    def __post_init__(self) -> None:
        require(
            self.restarts is None or is_whole(self.restarts, 0), f"restarts={self.restarts!r}", "Give a whole number."
        )
        require(
            is_whole(self.without_progress, 1),
            f"without_progress={self.without_progress!r}",
            "Give a whole number of at least 1.",
        )
        require(
            all(one in REMEDIES for one in self.remedies) and len({*self.remedies}) == len(self.remedies),
            f"remedies={self.remedies!r}",
            f"Give some of {', '.join(REMEDIES)}, each once.",
        )
        for cause, most in self.of_causes.items():
            require(is_whole(most, 0), f"of_causes={cause!r}: {most!r}", "Give a whole number.")
        for name in ("pause_seconds", "longest_pause_seconds"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, f"{name}={value!r}", "Give a number of seconds.")


@dataclass(frozen=True)
class Outcome:
    """How one attempt has ended.

    `restored_step`: from which it went on; None: it failed before. `last_step`: the newest step that was completed, by
    the rank that failed first.
    `saved_step`: the newest step that it has saved; 0: none.
    `code`: of the rank that failed first; 0: all ranks have ended regularly. `cause`: equal for failures of one kind;
    empty if it is not known. `error`: type and message of the exception. `batches_known`: whether it is known with
    which windows the next step would have trained. `after_loop`: whether it is known that the loop had ended by itself.
    `followed`: what followed it. `host`: where the rank that failed first was; empty: not known. `left_out`: the host
    that left the job because of it; empty: none.
    """

    restored_step: int | None
    last_step: int
    code: int
    saved_step: int = 0
    cause: str = ""
    error: str = ""
    batches_known: bool = False
    after_loop: bool = False
    followed: Act = "restart"
    host: str = ""
    left_out: str = ""

    @property
    def trained(self) -> bool:
        """Whether a step was completed after the restore."""
        return self.restored_step is not None and self.last_step > self.restored_step

    @property
    def saved_newer(self) -> bool:
        """Whether it has saved a newer step than the one from which it went on."""
        return self.saved_step > (self.restored_step or 0)


@dataclass(frozen=True)
class Answer:
    """What follows. `why`: for the log. `pause_seconds`: before a restart. `withdraws`: whether the generation that the
    job has gone back from is not to blame: it failed in the same way without it."""

    act: Act
    why: str
    pause_seconds: float = 0.0
    withdraws: bool = False

    @property
    def restart(self) -> bool:
        """Whether the job is started again."""
        return self.act != "end"


def answer(
    outcomes: Sequence[Outcome],
    budget: Budget,
    asked_to_end: bool = False,
    regrouped: str = "",
    left_out: str = "",
    earlier: Sequence[Outcome] = (),
) -> Answer:
    """What follows the last of these attempts. `outcomes`: all attempts so far, oldest first; at least one.

    `asked_to_end`: whether the supervisor was asked to end. `regrouped`: why the ranks were asked to save and to end,
    although the job goes on, on other nodes (default: it was for the end of the job). `left_out`: why a node leaves
    the job, which goes on without it (default: none does). `earlier`: the failures of jobs that this one continues,
    because their supervisors were lost, oldest first (default: there are none); they are no restarts of this job.

    Example: after one attempt with code 0 the job is done.
    """
    last = outcomes[-1]
    if last.code == 0:
        return Answer("end", "the job is done")
    if asked_to_end:
        return Answer("end", ASKED)
    if last.code == PREEMPTED:
        return Answer("restart", regrouped) if regrouped else Answer("end", "the ranks were asked to end")
    if hopeless(last) and not _found_only_suspects(outcomes):
        return Answer("end", "it would fail in the same way again")
    outcomes = [one for one in outcomes if one.code != PREEMPTED]  # guard: regrouping-is-no-failure
    if budget.restarts is not None and len(outcomes) > budget.restarts:  # guard: restarts-bounded
        return Answer("end", f"of the restarts that --max-restarts allows, {budget.restarts}, none is left")
    if left_out:  # guard: broken-node-uses-no-budget
        return Answer("restart", left_out)
    for cause, most in budget.of_causes.items():
        if _is_of(last, cause) and sum(_is_of(one, cause) for one in outcomes) > most:  # guard: causes-have-budgets
            return Answer("end", f"of the restarts that --cause-restarts allows after {cause}, {most}, none is left")
    outcomes = [*earlier, *outcomes]
    alike = _alike(outcomes)
    if len(alike) >= budget.without_progress:
        return _remedy(alike, budget)
    row, same = len(_in_a_row(outcomes)), without_progress(outcomes)
    if same >= budget.without_progress:  # guard: no-endless-restarts
        where = "before a state was restored" if last.restored_step is None else f"after step {last.restored_step}"
        return Answer("end", f"{plural(same, 'attempt')} in a row failed {where}, and nothing newer was saved")
    doublings = min(row - 2, _MOST_DOUBLINGS)
    pause = min(budget.pause_seconds * 2**doublings, budget.longest_pause_seconds) if row > 1 else 0.0
    if not same:
        return Answer("restart", f"a node was lost ({last.host}), which says nothing about the program", pause)
    if last.saved_newer:
        why = f"it has saved step {last.saved_step}"
        if last.error.startswith(DIVERGED) and last.saved_step == last.last_step:
            why = f"its Sentinel leaves batches out; step {last.saved_step} is kept for people only"
        return Answer("restart", why, pause)
    return Answer("restart", f"failure {same} of {budget.without_progress} without a newer saved step", pause)


def hopeless(one: Outcome) -> bool:
    """Whether an attempt has failed, before it had restored a state, in a way that comes again each time."""
    return one.restored_step is None and (bool(_HOPELESS.match(one.error)) or one.code == USAGE)


def _is_of(one: Outcome, cause: str) -> bool:
    """Whether an attempt failed of this cause: its kind, or its name without modules."""
    kind, _, what = one.cause.partition(" ")
    name = what.partition(":")[0]  # as of "SIGKILL: the kernel killed it for memory"  # guard: memory-kill-is-a-sigkill
    return cause in (kind, name, name.rpartition(".")[2])


def _is_of_a_place(one: Outcome) -> bool:
    """Whether an attempt failed because of a disk, a store or another node."""
    return one.cause == STORE or bool(_OF_A_PLACE.match(one.error))  # guard: lost-store-blames-no-state


def _found_only_suspects(outcomes: Sequence[Outcome]) -> bool:
    """Whether the last attempt was to go back, and has found nothing good but the generation that is suspect. It has
    marked what is damaged, so the next one takes the suspect as the only good one."""
    after_back = len(outcomes) > 1 and outcomes[-2].followed == "back"
    return after_back and outcomes[-1].error.startswith("NothingGood")  # guard: only-suspect-left-is-no-end


def _alike(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The last attempts in a row that failed with the same cause, after they had restored a state: at the same step, or
    each before it had completed any."""
    last, found = outcomes[-1], list[Outcome]()
    for one in reversed(outcomes):
        if not one.cause or one.restored_step is None or one.cause != last.cause:
            break
        if one.cause == NODE and one.host != last.host:  # guard: lost-nodes-blame-no-state
            break
        if one.error.startswith(DIVERGED) and one.saved_newer:  # guard: other-batches-are-another-failure
            break  # its Sentinel has left batches out: the next one fails at the same comparison with others
        if _is_of_a_place(one) != _is_of_a_place(last):  # guard: full-disk-is-own-cause
            break
        if one.last_step != last.last_step and (one.trained or last.trained):  # guard: first-steps-fail-alike
            break
        found.insert(0, one)
    return found


def _remedy(alike: Sequence[Outcome], budget: Budget) -> Answer:
    """What is tried against a failure that comes again at the same step. `alike`: the attempts with this failure."""
    last, tried = alike[-1], [one.followed for one in alike[:-1]]
    trained = any(one.trained for one in alike)
    where = f"after step {last.last_step}" if trained else "before a step was completed,"
    what = f"{plural(len(alike), 'attempt')} in a row failed {where} with the same cause"
    # A hang is an evaluation without a name, or a machine, rather than a batch.
    back = bool(last.restored_step) and not last.after_loop  # guard: failure-after-loop-blames-no-state
    possible = {"back": back, "skip": last.batches_known and trained and last.cause != HANG}
    judged = last.error.startswith(DIVERGED)  # guard: sentinel-has-judged-itself
    # guard: full-disk-blames-no-state
    for act in () if judged or _is_of_a_place(last) else budget.remedies:
        if act not in tried and possible[act]:  # guard: each-remedy-tried-once
            how = "from the generation before" if act == "back" else f"without the batches after step {last.last_step}"
            return Answer(act, f"{what}: it goes on {how}")
    done = [one for one in budget.remedies if one in tried]
    names = {"back": "going back one generation", "skip": "leaving out its batches"}
    withdraws = "back" in done and not trained  # guard: failure-without-it-clears-it
    ending = f"{what}{', also after ' if done else ''}{' and '.join(names[one] for one in done)}"
    if done and not withdraws:
        ending += "; once the cause is mended, delete the files about it in the folder advice of the run"
    return Answer("end", ending, withdraws=withdraws)


def without_progress(outcomes: Sequence[Outcome]) -> int:
    """How many of the last attempts in a row saved nothing newer, and went on from no newer step than the one before
    them.

    One that failed before it had restored anything counts with those beside it. The count begins anew when a host is
    left out for the first time: one that always comes back does not keep a job alive. The first loss of each node
    does not count, for up to LOST_NODES of them.
    """
    in_a_row = _in_a_row(outcomes)
    lost = [one.host for one in in_a_row if one.cause == NODE and one.host]
    return len(in_a_row) - min(len({*lost}), LOST_NODES)  # guard: lost-nodes-blame-no-program


def _in_a_row(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The last attempts that saved nothing newer, and went on from no newer step than the one before them."""
    found, step = [outcomes[-1]], outcomes[-1].restored_step
    if outcomes[-1].saved_newer:
        return found
    for place, one in reversed([*enumerate(outcomes[:-1])]):
        newer = step is not None and one.restored_step is not None and one.restored_step < step
        if newer or one.saved_newer:  # guard: saved-step-is-progress
            break
        if one.followed in REMEDIES:  # guard: remedy-begins-the-count-anew
            break
        if one.left_out and one.left_out not in {before.left_out for before in outcomes[:place]}:
            break
        step = one.restored_step if step is None else step
        found.append(one)
    return found


def replayed_steps(outcomes: Sequence[Outcome], before: int = 0) -> int:
    """How many steps the last attempt has trained again that one before it had completed.

    `before`: the newest step that the last attempt of an earlier job had completed (default: there was none).
    """
    last, completed = outcomes[-1], max([before, *(one.last_step for one in outcomes[:-1])])
    return 0 if last.restored_step is None else max(0, min(completed, last.last_step) - last.restored_step)
