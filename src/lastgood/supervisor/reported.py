"""What is reported of an attempt: its outcome, cause and phases, one line for people, and advice for the next restore.

Pure but for the time of advice: makes records and texts of what attempt.py has seen, and writes none.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from msgspec.structs import replace

from ..format import layout
from ..io.heartbeat import Progress
from ..policy import hang
from ..policy.blame import Ended, first_cause, follows, lost_others
from ..policy.recovery import HANG, NODE, PREEMPTED, REMEDIES, STORE, Answer, Outcome
from ..records import GenerationId
from ..run.advice import Advice, Skip
from .attempt import Lived
from .attempt_log import Attempt, Cause
from .watch import main_stack, restored_step

LINE_CHARACTERS = 160
"""of a cause in a report of one line"""
CLOSING_SECONDS = 0.5
"""how much later than the loss of its connections the end of a process may be noticed"""
ERROR_CHARACTERS = 4000
"""of an error in an Outcome: each verdict has all of them, and a value of torch's store has 8 MiB at most"""
REPLAYED = "replayed steps"
"""the phase that is a part of others"""
LAUNCH, NOTICED, EARLY, END = "launch", "last step to failure noticed", "failure before a step", "last step to end"
PHASES = (
    "rendezvous",
    "start",
    LAUNCH,
    "program to run open",
    "restore",
    "first step",
    "training",
    REPLAYED,
    NOTICED,
    EARLY,
    "tear down",
    END,
)
"""the names of phases, in their order"""


def cause(lived: Lived) -> Cause | None:
    """Why an attempt has failed; None if it has not."""
    first = first_cause(lived.ended)
    if lived.lost is not None and (first is None or follows(first)):  # guard: lost-node-blamed-before-followers
        rank, what = lived.lost
        if rank is None:  # guard: lost-store-blames-no-node
            return Cause(kind=STORE, rank=0, code=-signal.SIGKILL, what=what)
        return Cause(kind=NODE, rank=rank, code=-signal.SIGKILL, what=what)
    if lived.hang is not None:
        one, texts = lived.hang.behind, {str(rank): text for rank, text in lived.hang.stacks.items()}
        done = [ended.rank for ended in lived.ended if ended.code == 0]
        note = f"; rank {done[0]} had ended with exit code 0" if done else ""
        what = hang.described(one, lived.hang.silent) + note
        return Cause(kind=HANG, rank=one.signs.rank, code=-signal.SIGKILL, what=what, stacks=texts)
    if first is None or _ended_as_asked(first, lived):
        return None
    left = _left_others(first, lived)
    if left is not None:
        error = first.error or _code_text(first.code)
        what = f"exit code 0 while rank {first.rank} went on, which then failed: {error}"
        return Cause(kind="exit", rank=left.rank, code=0, what=what, stack=lived.stacks.get(first.rank, ""))
    if first.error:
        stack = lived.stacks.get(first.rank, "")
        return Cause(kind="exception", rank=first.rank, code=first.code, what=first.error, stack=stack)
    if first.code < 0:
        name, where = _code_text(first.code), lived.out_of_memory.get(first.rank)
        what = name if where is None else f"{name}: the kernel killed it for memory ({where})"
        return Cause(kind="signal", rank=first.rank, code=first.code, what=what)
    return Cause(kind="exit", rank=first.rank, code=first.code, what=_code_text(first.code))


def _left_others(first: Ended, lived: Lived) -> Ended | None:
    """The rank that ended with exit code 0 before others lost their connections to it; None: there is none, or the job
    was asked to end. `first`: the rank that failed first."""
    # guard: early-end-blamed-for-followers
    if not (follows(first) and lost_others(first)) or lived.asked_by or lived.asked:
        return None
    until = first.at_seconds + CLOSING_SECONDS
    left = [one for one in lived.ended if one.code == 0 and one.at_seconds < until]
    return min(left, key=lambda one: (one.at_seconds, one.rank), default=None)


def _code_text(code: int) -> str:
    return _signal_name(-code) if code < 0 else f"exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"


def _ended_as_asked(first: Ended, lived: Lived) -> bool:
    """Whether a rank was ended by the signal that it was sent because the job, or this node, was asked to end."""
    by = {lived.asked_by, signal.SIGTERM if lived.asked else 0} - {0}
    # Lightning ends with sys.exit(1) at a KeyboardInterrupt.
    by_interrupt = first.error.partition(":")[0] == KeyboardInterrupt.__name__ or (first.code == 1 and not first.error)
    interrupted = signal.SIGINT in by and by_interrupt
    return -first.code in by or interrupted  # guard: asked-end-is-no-failure


def outcome(lived: Lived, found: Cause | None, host: str = "") -> Outcome:
    """An attempt as the policy sees it. `host`: of the rank of its cause (default: not known)."""
    last = _last(lived, found)
    return Outcome(
        restored_step=restored_step(lived.progress, last),
        last_step=0 if last is None else last.step,
        saved_step=max((one.saved_step for one in lived.progress), default=0),
        code=_code(lived, first_cause(lived.ended), found),
        cause=found.key if found is not None else "",
        error=found.what[:ERROR_CHARACTERS] if found is not None and found.kind == "exception" else "",
        batches_known=_skip(last) is not None,
        after_loop=last is not None and any(last.position) and not last.position.windows,
        host=host,
    )


def advice(lived: Lived, attempt: Attempt, follows: Answer, before: Sequence[Advice]) -> Advice | None:
    """What the next restore is to do differently; None: nothing. `before`: the advice that the run has."""
    what = attempt.cause.what.splitlines()[0] if attempt.cause is not None else ""
    why = f"{follows.why}; the last cause: {what}"
    made = Advice(format=layout.FORMAT, by="supervisor", at=time.time(), step=attempt.last_step, why=why)
    if follows.act == "back" and attempt.restored_step is not None and attempt.incarnation:
        return replace(made, suspect=GenerationId(step=attempt.restored_step, incarnation=attempt.incarnation))
    if follows.withdraws:
        last = next((one for one in reversed(before) if one.by == made.by and one.suspect is not None), None)
        return replace(made, suspect=last.suspect, withdrawn=True) if last is not None else None
    if follows.act == "skip":
        return replace(made, skip=_skip(_last(lived, attempt.cause)))
    return None


def phases(lived: Lived, replayed: int) -> dict[str, float]:
    """Phase -> seconds, of the rank that took longest. A phase that was not reached is left out. Of one rank all but
    "rendezvous" and REPLAYED add up to the seconds of the attempt.

    `replayed`: how many steps were trained again; their seconds are a part of those of "first step" and "training".
    """
    found = {"rendezvous": lived.rendezvous} if lived.rendezvous else {}
    found["start"] = lived.started - lived.began

    def longest(name: str, times: Sequence[tuple[float | None, float | None]]) -> None:
        known = [end - begin for begin, end in times if begin is not None and end is not None]
        if known:
            found[name] = max(0.0, *known)

    ranks = lived.progress
    longest(LAUNCH, [(lived.started, one.begun) for one in ranks])
    longest("program to run open", [(one.begun, one.opened) for one in ranks])
    longest("restore", [(one.opened, one.restored) for one in ranks])
    longest("first step", [(one.restored, one.first) for one in ranks])
    longest("training", [(one.first, one.beat) for one in ranks])
    again = [_replay_seconds(one, replayed) for one in ranks if one.step > one.restored_step]
    if replayed and again:
        found[REPLAYED] = max(again)
    last = max((one.beat for one in ranks if one.beat is not None), default=None)
    begun = [lived.started, *(at for one in ranks for at in (one.begun, one.opened, one.restored) if at is not None)]
    until = lived.over if lived.failed is None else lived.failed
    name = END if lived.failed is None else EARLY if last is None else NOTICED
    found[name] = max(0.0, until - (max(begun) if last is None else last))
    if lived.failed is not None:
        found["tear down"] = lived.over - lived.failed
    return found


def _replay_seconds(one: Progress, steps: int) -> float:
    """How long a rank took for so many steps from the restored one on, the first of which may take longer. The others
    count as long as their mean, with the saves and phases between them."""
    if one.restored is None or one.first is None or one.beat is None:
        return 0.0
    done = one.step - one.restored_step
    each = (one.beat - one.first) / (done - 1) if done > 1 else 0.0
    return one.first - one.restored + (min(steps, done) - 1) * each


def sentence(one: Attempt, number: int) -> str:
    """One line about an attempt, for people. `number`: of the attempt, of this supervisor."""
    found = one.cause
    if found is not None and found.kind == HANG:
        return f"attempt {number}: rank {found.rank} {found.what}, after {one.seconds:.1f} s. {one.answer}."
    if found is not None and found.kind in (NODE, STORE):
        return f"attempt {number}: {found.what}, at step {one.last_step}, after {one.seconds:.1f} s. {one.answer}."
    what = "ended" if found is None else f"rank {found.rank} failed first: {short(found.what)}"
    since = "before a state was restored" if one.restored_step is None else f"at step {one.last_step}"
    return f"attempt {number}: {what}, {since}, after {one.seconds:.1f} s. {one.answer}."


def given_up(outcomes: Sequence[Outcome], run: str, missing: bool) -> str:
    """One line about a job that is given up, for people: what is safe, and what to do. `run`: its URL; "" if no rank
    had opened one. `missing`: whether there is nothing at this URL any more."""
    then = "Mend what the error says, and start the same command again"
    if any(one.followed in REMEDIES for one in outcomes):
        then = "Mend what the error says, delete what advice/ of the run has about it (else its batches stay left out, "
        then += "and its generation suspect), and start the same command again"
    if not run:
        hint = "A script that starts the training as another process is run with --no-python python SCRIPT"
        return f"the job is given up. No run of lastgood was opened. {then}. {hint}."
    steps = [max(one.saved_step, one.restored_step) for one in outcomes if one.restored_step is not None]
    newest = f"the newest step that it has saved or restored is {max(steps)}" if steps else "it has restored no step"
    if missing:
        return (
            f"the job is given up; {newest}. {run} is not in its place any more: it was moved or deleted, or its disk "
            "is not mounted. Bring it back, and start the same command again: it goes on from the newest good save."
        )
    return (
        f"the job is given up; {newest}. Every good save of {run} is still there. {then}: it goes on from the newest "
        f"good one. `lastgood attempts {run} --json` has each attempt, with its whole error."
    )


def without_save(last: Outcome, number: int, others_go_on: bool) -> str:
    """One line about a job that was asked to end by signal `number`, and whose ranks did not end as after a last save,
    for people. `last`: its last attempt. `others_go_on`: whether only this node ends."""
    ended = "ended by themselves"
    if last.cause:
        ended = "failed"
    elif last.code == PREEMPTED:  # so that the others go on: how they have ended does not count
        ended = "ended"
    elif last.code == -signal.SIGKILL:
        ended = "did not all end in time (--shutdown-timeout)"
    made_by = "lastgood.Preemption()"
    if number not in (signal.SIGTERM, signal.SIGUSR1):  # to which it listens by default
        made_by = f"lastgood.Preemption(signals=[..., signal.{_signal_name(number)}])"
    then = "If the job was not done, it goes on from its newest save when it is started again"
    if others_go_on:
        then = "The other nodes go on from the newest save of the job"
    return (
        f"asked to end by {_signal_name(number)}: the ranks {ended}, without exit code {PREEMPTED} of a last save, "
        f"which a Checkpointer with preemption={made_by} makes; exit code {128 + number}. {then}"
    )


def stack(found: Cause | None) -> str:
    """The calls of the rank that hangs, the innermost one first, each on a line of its own after a line break; empty if
    none does. For a report where no run is known, in whose records all stacks would be."""
    text = "" if found is None else found.stacks.get(str(found.rank), "")
    return "".join(f"\n  {call}" for call in main_stack(text))


def short(what: str) -> str:
    """The first line of a text as a part of a sentence: without its full stop and control characters, and cut off after
    a word where it is long. Of a list that begins with a line of its own, that line and the first entry.

    `lastgood attempts --json` has all of it.
    """
    line, _, rest = what.partition("\n")
    if rest and line.rstrip().endswith(":"):  # a message that begins with an empty line
        first, _, more = rest.lstrip().partition("\n")
        line = f"{line.rstrip()} {first.rstrip(' .')}" + (" ..." if more.strip() else "")
    else:
        line = line.rstrip(" .")
    line = "".join(one if one.isprintable() else " " for one in line)
    if len(line) <= LINE_CHARACTERS:
        return line
    end = line.rfind(" ", LINE_CHARACTERS // 2, LINE_CHARACTERS + 1)
    return f"{line[:LINE_CHARACTERS]}..." if end < 0 else f"{line[:end]} ..."


def _last(lived: Lived, found: Cause | None) -> Progress | None:
    """What the rank has shown that failed first; without one, the rank that came furthest.

    Another rank may have completed the step in which that one failed.
    """
    first = next((one for one in lived.progress if found is not None and one.rank == found.rank), None)
    return first or max(lived.progress, key=lambda one: one.step, default=None)  # guard: step-of-the-rank-that-failed


def _skip(last: Progress | None) -> Skip | None:
    """The windows that the step after the last completed one has trained, if there is one sampler."""
    if last is None or not last.position.windows:
        return None
    epoch, window, windows = last.position
    return Skip(epoch=epoch, first=window, count=windows)


def _code(lived: Lived, first: Ended | None, found: Cause | None) -> int:
    """The code of the rank that failed first. If none has: SIGKILL where one was killed, else the highest; and if that
    is 0 and the job was asked to end, the signal, because a training that a handler cuts short ends with 0 too."""
    if lived.asked and found is None:
        return PREEMPTED
    if found is not None:
        return found.code or 1
    if first is not None:
        return first.code
    if lived.killed:  # guard: killed-rank-is-no-success
        return -signal.SIGKILL
    return max((one.code for one in lived.ended), default=1) or -lived.asked_by
