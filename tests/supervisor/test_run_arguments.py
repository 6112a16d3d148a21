"""The arguments of `lastgood run` are those of torchrun."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from lastgood.errors import Refused
from lastgood.supervisor.arguments import Job, parsed
from lastgood.supervisor.options import parser
from lastgood.supervisor.placement import Placement
from lastgood.supervisor.program import Program
from lastgood.supervisor.rank_start import RankStart

WITHOUT_BOUND = {"max_restarts"}
"""torchrun's default is 0; a supervisor is there to start again"""
TYPED_OTHERWISE = {"duplicate_stdout_filters", "duplicate_stderr_filters", "shutdown_timeout"}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def test_each_option_of_torchrun_has_the_same_names_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {one.dest: one for one in parser({})._actions}
    for theirs in get_args_parser()._actions:
        if theirs.dest == "help":
            continue
        assert set(theirs.option_strings) == set(ours[theirs.dest].option_strings)
        assert theirs.choices == ours[theirs.dest].choices
        if theirs.dest not in WITHOUT_BOUND | TYPED_OTHERWISE:
            assert (theirs.default or None) == (ours[theirs.dest].default or None), theirs.dest


def test_the_help_has_no_option_twice() -> None:
    """It had "--nnodes NNODES, --nnodes NNODES"."""
    for option in parser({})._actions:
        assert len({*option.option_strings}) == len(option.option_strings)


def test_what_follows_the_script_is_its_own(script: str) -> None:
    job = parsed(["--nproc-per-node", "4", script, "--nproc-per-node", "7", "-m"], {})
    assert job.ranks == 4 and job.program.arguments == ["--nproc-per-node", "7", "-m"]
    assert job.program.kind == "script" and not job.spawn


def test_an_option_of_the_script_may_be_spelt_like_the_beginning_of_ours(script: str) -> None:
    """`lastgood run train.py --run DIR` was refused: --run could be --run-path or --run_path."""
    own = ["--run", "d", "--policy", "p", "--", "-ro", "--n"]
    for before in (["--nnode=1", "-r", "1", "--tee=0"], ["--spawn", "-r1", "--"], ["--nproc-per", "1"], []):
        assert parsed([*before, script, *own], {}).program.arguments == own
    with pytest.raises(Refused, match="ambiguous option: --run could match"):
        parsed(["--run", script], {})


def test_variables_of_torchrun_are_defaults(script: str) -> None:
    assert parsed([script], {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "5"}).ranks == 3
    assert parsed([script], {"PET_MAX_RESTARTS": "5"}).budget.restarts == 5
    assert parsed(["-m", "json.tool"], {}).program.kind == "module"


def test_each_job_of_one_node_has_an_id_of_its_own(script: str) -> None:
    """Two jobs on a machine had the TORCHELASTIC_RUN_ID "none" both, so that folders that scripts name so were one."""
    assert parsed([script], {}).run_id != parsed([script], {}).run_id != "none"
    assert parsed(["--rdzv-id", "7", script], {}).run_id == "7"
    assert parsed(["--nnodes", "2", script], {}).run_id == "none", "all nodes need the same"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("PET_HANG_TIMEOUT", "abc", "^PET_HANG_TIMEOUT: 'abc' is not a number of seconds"),
        ("PET_MASTER_PORT", "99999", "^PET_MASTER_PORT: '99999' is no port"),
        ("PET_UNHEALTHY", "leav", "^PET_UNHEALTHY: 'leav' is none of its values. Did you mean leave"),
        ("PET_SPAWN", "true", "^PET_SPAWN: 'true' is neither 1 nor 0"),
        ("PET_NPROC_PER_NODE", "many", r"no number of ranks \(--nproc-per-node comes from PET_NPROC_PER_NODE\)"),
        ("PET_RDZV_BACKEND", "etcd", r"etcd is not done \(--rdzv-backend comes from PET_RDZV_BACKEND\)"),
    ],
)
def test_a_wrong_variable_is_named_and_not_only_its_option(name: str, text: str, says: str, script: str) -> None:
    """The error spoke of --hang-timeout, which stood nowhere. PET_UNHEALTHY=leav and PET_SPAWN=true changed nothing."""
    with pytest.raises(Refused, match=says):
        parsed([script], {name: text})


def test_a_flag_replaces_a_variable_that_is_wrong(script: str) -> None:
    assert parsed(["--hang-timeout", "5", script], {"PET_HANG_TIMEOUT": "abc"}).limits.least_seconds == 5.0


def test_the_long_limit_of_a_hang_is_never_below_that_of_a_step(script: str) -> None:
    """`--hang-long-timeout 1 --hang-timeout 60` was accepted: a first step of two seconds would have been a hang."""
    with pytest.raises(Refused, match="--hang-long-timeout 1 is less than --hang-timeout 60"):
        parsed(["--hang-long-timeout", "1", script], {})
    assert parsed(["--hang-timeout", "7200", script], {}).limits.long_seconds == 7200.0
    assert parsed(["--hang-timeout", "30", script], {}).limits.long_seconds == 3600.0
    assert parsed(["--hang-timeout", "0", "--hang-long-timeout", "0", script], {}).limits.least_seconds == 0.0


def test_variables_of_torchrun_without_its_prefix_are_honoured(script: str) -> None:
    """TORCH_ELASTIC_SHUTDOWN_TIMEOUT is the default of --shutdown-timeout in torch; it was not read."""
    name, prefixed = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"
    assert parsed([script], {}).shutdown_seconds == 30.0
    assert parsed([script], {name: "7"}).shutdown_seconds == 7.0
    assert parsed([script], {name: "7", prefixed: "8"}).shutdown_seconds == 8.0
    assert parsed(["--shutdown-timeout", "9", script], {name: "7", prefixed: "8"}).shutdown_seconds == 9.0
    with pytest.raises(Refused, match=f"^{name}: 'soon' is not a number of seconds"):
        parsed([script], {name: "soon"})


def test_a_path_that_is_run_comes_before_what_contradicts_it(script: str) -> None:
    """As under torchrun, where --run-path takes precedence: the file was executed as a program."""
    for given in (["--run-path", "--no-python"], ["--run-path", "--no-python", "-m"], ["--run-path", "-m"]):
        job = parsed([*given, script], {})
        assert job.program.kind == "script" and not job.spawn


def test_a_job_of_this_machine_alone_has_no_rendezvous(script: str) -> None:
    """Of --standalone, torchrun ignores what else is said of the rendezvous; it was refused."""
    for given in (["--rdzv-backend", "etcd"], ["--node-rank", "1"], ["--rdzv-endpoint", "a:1"]):
        assert parsed(["--standalone", *given, script], {}).rendezvous is None


def test_events_that_nobody_writes_are_reported(script: str) -> None:
    assert (
        "--event-log-handler console has no effect" in parsed(["--event-log-handler", "console", script], {}).notes[0]
    )
    assert not parsed([script], {}).notes


def test_each_rank_has_its_number_in_the_arguments(script: str, tmp_path: Path) -> None:
    """torchrun puts it in the place of ${local_rank}."""
    job = parsed(["--nproc-per-node", "2", script, "--log", "out-${local_rank}.txt", "kill $$"], {})
    place = Placement(0, 1, 0, 2, "localhost", 1)
    start = RankStart(job, 0, tmp_path, None, place)
    assert [start._program(one).arguments[1] for one in range(2)] == ["out-0.txt", "out-1.txt"]
    assert start._program(0).arguments[2] == "kill $$", "which torchrun makes a single dollar"


def test_another_python_starts_the_script_as_under_torchrun(script: str) -> None:
    """PYTHON_EXEC, with which a cluster starts Python through a program of its own, was not read."""
    environ = {"PYTHON_EXEC": "true"}
    job = parsed([script, "--lr", "1"], environ)
    assert job.spawn and job.program == Program(kind="command", name="true", arguments=["-u", script, "--lr", "1"])
    assert parsed(["-m", "json.tool"], environ).program.arguments == ["-u", "-m", "json.tool"]
    assert parsed(["--no-python", "echo", "1"], environ).program.name == "echo"
    other_name = Path(sys.executable).with_name("python3" if sys.executable.endswith("python") else "python")
    assert other_name.exists()
    executables = [{"PYTHON_EXEC": str(one)} for one in (sys.executable, other_name)]
    for same in (parsed(["--run-path", script], environ), *(parsed([script], one) for one in executables)):
        assert same.program.kind == "script" and not same.spawn
    with pytest.raises(Refused, match="PYTHON_EXEC: there is no command no-such-python"):
        parsed([script], {"PYTHON_EXEC": "no-such-python"})
    with pytest.raises(Refused, match="--preload and PYTHON_EXEC contradict"):
        parsed(["--preload", "json", script], environ)


def test_the_timeout_of_a_static_rendezvous_is_its_join_timeout(script: str) -> None:
    """torchrun takes it with its default backend; it was refused as an unknown key."""

    def configuration(*given: str) -> dict[str, str]:
        found = parsed(["--nnodes=2", *given, script], {}).rendezvous
        assert found is not None and "timeout" not in found.settings.configuration
        return found.settings.configuration

    assert configuration("--rdzv-conf=timeout=90")["join_timeout"] == "90"
    assert configuration("--rdzv-conf=timeout=90,join_timeout=80")["join_timeout"] == "80"
    assert "join_timeout" not in configuration("--rdzv-backend=c10d", "--rdzv-conf=timeout=90")


def test_options_that_have_no_effect_with_c10d_are_reported(script: str) -> None:
    """They were ignored without a word, where torchrun warns."""
    given = ["--node-rank=1", "--master-addr=head", "--master-port=1", "--rdzv-conf=timeout=9"]
    c10d = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=head"]
    notes = parsed([*c10d, *given, script], {}).notes
    assert [one.split(" has no effect with --rdzv-backend c10d")[0] for one in notes] == [
        "--node-rank 1",
        "--master-addr head",
        "--master-port 1",
        "--rdzv-conf timeout",
    ]
    assert parsed(["--nnodes=2", *given, script], {}).notes == [] and parsed([*c10d, script], {}).notes == []
    one_node = ["--rdzv-backend=c10d", "--node-rank=1", "--master-addr=head", script]
    assert parsed(one_node, {}).notes == ["--node-rank 1 has no effect with --rdzv-backend c10d"]


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ("--local-addr a", "--local-addr a has no effect with one node"),
        ("--rdzv-endpoint a,b", "--rdzv-endpoint a,b has no effect with one node"),
        ("--warm-ranks --max-restarts 0", "--warm-ranks has no effect with --max-restarts 0"),
        ("--duplicate-stdout-filters a --tee 2", "--duplicate-stdout-filters has no effect: --tee copies stdout of no"),
        (
            "--duplicate-stderr-filters a --tee 3 --local-ranks-filter 0 --log-dir /dev/null",
            ("--tee, --redirects and", "--duplicate-stderr-filters has no effect"),
        ),
        (
            "--duplicate-stderr-filters a --tee 0:2 --local-ranks-filter 1 --nproc-per-node 2",
            "--duplicate-stderr-filters has no",
        ),
        ("--local-ranks-filter 0,7", "--local-ranks-filter 7 shows no output: this node has local ranks 0 to 0"),
        ("--nnodes 2 --rdzv-endpoint a --master-addr b", "--master-addr b has no effect beside --rdzv-endpoint a"),
        ("--nnodes 2 --rdzv-endpoint a --master-port 1", "--master-port 1 has no effect beside --rdzv-endpoint a"),
    ],
)
def test_each_option_without_effect_is_reported_once(given: str, reported: str | tuple[str, ...], script: str) -> None:
    """They were ignored silently; --local-ranks-filter 7 with two ranks left the console without their output."""
    job = parsed([*given.split(), script], {})
    expected = (reported,) if isinstance(reported, str) else reported
    assert len(job.notes) == len(expected) and not job.warm_ranks
    assert all(note.startswith(text) for note, text in zip(job.notes, expected, strict=True))


def test_processes_for_a_next_attempt_wait_where_nodes_may_come(script: str) -> None:
    job = parsed(["--nnodes", "1:2", "--rdzv-backend", "c10d", "--warm-ranks", "--max-restarts", "0", script], {})
    assert job.warm_ranks and not job.notes


@pytest.mark.parametrize(
    "given",
    [
        ["--log-dir", "/proc/x"],
        ["--log-dir", "/proc"],
        ["--log-dir", "SCRIPT"],
        ["--log-dir", "SCRIPT/x"],
        ["--log-dir", "FOLDER", "--rdzv-id", 300 * "x"],
        ["--records", "/proc/x"],
        ["--records", "/proc"],
        ["--records", "SCRIPT/x"],
        ["--health-file", "FOLDER"],
        ["--health-file", "SCRIPT/x"],
        ["--health-file", "FOLDER/socket"],
        ["--policy", "/proc/x"],
        ["--policy", "FOLDER"],
        ["--policy", "SCRIPT/x"],
        ["--nnodes", "1:2", "--stage", "SCRIPT"],
    ],
)
def test_files_and_folders_that_cannot_be_used_are_refused(given: list[str], script: str, tmp_path: Path, call) -> None:
    """`--log-dir /proc/x` ended with a traceback and code 1, and `--records /proc` was reported at the end only."""
    (tmp_path / "logs").mkdir()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "logs" / "socket"))
        named = [text.replace("SCRIPT", script).replace("FOLDER", str(tmp_path / "logs")) for text in given]
        code, _, err = call("run", *named, script)
    assert code == 3 and "Nothing was" in err and "Traceback" not in err
    assert [one.name for one in (tmp_path / "logs").iterdir()] == ["socket"]


@pytest.mark.parametrize("option", ["--log-dir", "--records", "--health-file"])
def test_no_folder_is_named_like_a_url_or_a_tilde(
    option: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--records s3://bucket/r` and `--records=~/x` wrote to folders named `s3:` and `~`, beside the script."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for text in ("s3://bucket/r", "gs://bucket/r", "$NOWHERE/r"):
        with pytest.raises(Refused, match=re.escape(f"{option}={text!r}")):
            parsed([option, text, script], {})
    variable = f"PET_{option.removeprefix('--').replace('-', '_').upper()}"
    with pytest.raises(Refused, match=f"{option} comes from {variable}"):
        parsed([script], {variable: "s3://bucket/r"})
    job = parsed([f"{option}=~/x", script], {})
    found = job.log_dir or job.records or job.health_file
    assert str(found) == str(tmp_path / "home" / "x")


def test_folders_for_output_that_are_not_there_are_made(script: str, tmp_path: Path, call) -> None:
    given = ["--log-dir", str(tmp_path / "a/b"), "--records", str(tmp_path / "c/d"), "--rdzv-id", "x/y"]
    assert call("run", *given, "--no-python", "true")[0] == 0
    assert [one.name[:2] for one in (tmp_path / "a/b/x").iterdir()] == ["y_"]
    assert [one.name for one in (tmp_path / "c/d").iterdir()] == ["supervisor.json"]


def redirects(text: str, script: str) -> dict[int, int]:
    job: Job = parsed(["--nproc-per-node=2", "--redirects", text, script], {})
    return dict(job.outputs.redirects)


def test_output_of_some_ranks_may_go_to_files(script: str) -> None:
    assert redirects("3", script) == {0: 3, 1: 3}
    assert redirects("0:1,1:2", script) == {0: 1, 1: 2}


def test_several_endpoints_are_places_of_the_store(script: str) -> None:
    one, several = (
        parsed(["--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint", given, script], {}).rendezvous
        for given in ("node0", "node0,node1:29500, [fe80::1%br-lan.7]:29400")
    )
    assert one is not None and several is not None
    assert (one.settings.endpoint, one.settings.stores) == ("node0", ())
    assert several.settings.stores == ("node0:29400", "node1:29500", "[fe80::1%br-lan.7]:29400")
    assert several.settings.endpoint == "node0:29400"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("node0,:29400", "':29400' is no endpoint"),
        ("node0,", "'' is no endpoint"),
        ("[]:29400,node1", "'[]:29400' is no endpoint"),
        ("fd00::1,fd00::2", "'fd00::1' is no endpoint"),
        ("fd00::a,fd00::b", "'fd00::a' is no endpoint"),
        ("node0,node1:port", "'node1:port' is no endpoint"),
        ("node0,node1:0", "'node1:0' is no endpoint"),
        ("node0,node1:65536", "'node1:65536' is no endpoint"),
        ("node0,node1,node0:29400", "names node0:29400 twice"),
    ],
)
def test_an_endpoint_that_cannot_be_meant_is_named_and_refused(given: str, named: str, script: str) -> None:
    """The last part of an IPv6 address without brackets was taken for its port, and a name with a colon for a host."""
    with pytest.raises(Refused, match=re.escape(named)):
        parsed(["--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint", given, script], {})


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2", "zzz"])
def test_another_rendezvous_is_refused_whatever_the_number_of_nodes(backend: str, script: str) -> None:
    """With one node --rdzv-backend etcd, or a mistyped one, was accepted, and failed once the job had more nodes."""
    for nodes in ("1", "2", "1:4"):
        with pytest.raises(Refused, match=f"--rdzv-backend {backend} is not done"):
            parsed(["--nnodes", nodes, "--rdzv-backend", backend, script], {})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nprocs", "2", "SCRIPT"], "--nprocs"),
        (["--nproc-per-node", "many", "SCRIPT"], "many"),
        (["--nproc-per-node", "0", "SCRIPT"], "0"),
        (["--nnodes", "2,4", "SCRIPT"], "--nnodes 2,4"),
        (["--nnodes", "4:2", "SCRIPT"], "--nnodes 4:2"),
        (["--node-rank", "1", "SCRIPT"], "--node-rank 1 with one node"),
        (["--nnodes", "2", "--node-rank", "2", "SCRIPT"], "--node-rank 2 of 2 nodes"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "SCRIPT"], "--rdzv-backend etcd"),
        (["--nnodes", "2", "--standalone", "SCRIPT"], "contradict"),
        (["--spares", "1", "SCRIPT"], "--spares 1 with one node"),
        (["--nnodes", "1", "--rdzv-backend", "c10d", "--spares", "2", "SCRIPT"], "--spares 2 with one node"),
        (["--nnodes", "2", "--spares", "-1", "SCRIPT"], "'-1' is not a whole number of at least 0"),
        (["--nnodes", "2", "--spares", "one", "SCRIPT"], "'one' is not a whole number of at least 0"),
        (["--nnodes", "2", "--spares", "1", "--node-rank", "3", "SCRIPT"], "--node-rank 3 of 2 nodes and 1 in reserve"),
        (["--stage", "runs/gpt", "SCRIPT"], "--stage runs/gpt with one node"),
        (["--nnodes", "2", "--stage", "slots:///x", "SCRIPT"], "--stage slots:///x"),
        (["--nnodes", "2", "--stage", "s4://bucket/run", "SCRIPT"], "s4"),
        (["--nnodes", "2", "--rdzv-conf", "join_timout=5", "SCRIPT"], "join_timout=5"),
        (["--rdzv-conf", "join_timout=5", "SCRIPT"], "join_timout=5"),
        (["--nnodes", "2", "--rdzv-conf", "join_timeout=soon", "SCRIPT"], "join_timeout=soon"),
        (["--nnodes", "3", "--rdzv-endpoint", "a,b", "--rdzv-conf", "is_host=1", "SCRIPT"], "is_host with several"),
        (["--tee", "7", "SCRIPT"], "--tee 7"),
        (["--local-ranks-filter", "0;1", "SCRIPT"], "0;1"),
        (["--logs-specs", "mine", "SCRIPT"], "--logs-specs mine"),
        (["--log-dir", "SCRIPT", "SCRIPT"], "no folder"),
        (["--spawn", "--preload", "json", "SCRIPT"], "contradict"),
        (["--hang-timeout", "0", "--hang-long-timeout", "9", "SCRIPT"], "--hang-long-timeout 9 contradict each other"),
        (["--slow-factor", "0.5", "SCRIPT"], "slow-factor"),
        (["--remedies", "none,back", "SCRIPT"], "'none,back': none stands alone, for no remedy at all"),
        (["--remedies", "skip,none", "SCRIPT"], "'skip,none': none stands alone"),
        (["--cause-restarts", "hagn=2", "SCRIPT"], "'hagn' is no cause"),
        (["--cause-restarts", "Hang=2", "SCRIPT"], "'Hang' is no cause"),
        (["--cause-restarts", "SIGKIL=2", "SCRIPT"], "'SIGKIL' is no cause"),
        (["--cause-restarts", "SIGIOT=2,SIGABRT=3", "SCRIPT"], "SIGABRT is given twice"),
        (["--cause-restarts", "hang=often", "SCRIPT"], "hang=often: 'often' is not a whole number .* Write hang=5"),
        (["--cause-restarts", "hang=2,hang=3", "SCRIPT"], "hang is given twice"),
        (["--master-port", "99999", "SCRIPT"], "'99999' is no port: give a whole number from 0 to 65535"),
        (["--master-port", "-1", "SCRIPT"], "'-1' is no port"),
        (["--redirects", "7", "SCRIPT"], "--redirects 7"),
        (["--redirects", "5:1", "SCRIPT"], "--redirects 5:1"),
        (["--no-python", "-m", "SCRIPT"], "contradict"),
        (["--max-restarts", "-1", "SCRIPT"], "restarts"),
        (["/there/is/no/script.py"], "no file"),
        (["--no-python", "no-such-command"], "no command no-such-command"),
        (["--signals-to-handle", "SIGTERM,SIGFOO", "SCRIPT"], "SIGFOO"),
        (["--signals-to-handle", "SIGKILL", "SCRIPT"], "SIGKILL"),
        ([], "required"),
    ],
)
def test_what_cannot_be_meant_or_is_not_done_is_refused_by_name(arguments: list[str], says: str, script: str) -> None:
    """`--master-port 99999` failed three times with code 9, and none,back was answered: 'none' is no remedy. Did you
    mean none?"""
    with pytest.raises(Refused, match=says) as found:
        parsed([script if one == "SCRIPT" else one for one in arguments], {})
    assert found.value.safe == "Nothing was started." or "Nothing was touched" in found.value.safe


@pytest.mark.parametrize(
    ("arguments", "todo"),
    [
        (["python", "train.py"], "leave it out, or put --no-python before it. A module: -m NAME."),
        (["--no-python", "./script.sh"], "Make it executable (chmod +x)."),
    ],
)
def test_a_command_where_a_script_belongs_is_answered_with_what_is_meant(
    arguments: list[str], todo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lastgood run python train.py`, a habit of other launchers, was answered: give the path of the script."""
    (tmp_path / "python").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    work = tmp_path / "work"
    work.mkdir()
    (work / "script.sh").touch(0o644)
    monkeypatch.chdir(work)
    with pytest.raises(Refused) as found:
        parsed(arguments, {})
    assert todo in found.value.todo


def test_a_script_that_can_be_read_once_is_refused(tmp_path: Path) -> None:
    """`cat train.py | lastgood run /dev/stdin` trained nothing, and ended with 0."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused, match="neither a file nor a folder"):
        parsed([str(tmp_path / "pipe")], {})


def test_a_mistyped_option_is_answered_with_a_near_one(script: str) -> None:
    with pytest.raises(Refused) as found:
        parsed(["--nproc-per-nod3", "2", script], {})
    assert "Did you mean --nproc-per-node?" in found.value.todo
    with pytest.raises(Refused) as found:
        parsed(["--nprocs", "2", script], {})
    assert "Did you mean --nproc-per-node?" in found.value.todo, "not --policy"
    with pytest.raises(Refused) as found:
        parsed(["--hang", "2", script], {})
    assert "Did you mean" not in found.value.todo, "it is the beginning of three options"
    with pytest.raises(Refused) as found:
        parsed(["--nnodes", "2", "--sparse", "1", script], {})
    assert "Did you mean --spares?" in found.value.todo


@pytest.mark.parametrize("arguments", [["--nproc", "2"], ["--nproc=2"]])
def test_a_short_form_of_one_option_is_answered_with_it(script: str, arguments: list[str]) -> None:
    """`--nproc 2` was called ambiguous between two spellings of one option, as by torchrun, without a way out."""
    with pytest.raises(Refused) as found:
        parsed([*arguments, script], {})
    assert "Did you mean --nproc-per-node?" in found.value.todo


def test_spare_nodes_have_numbers_after_those_of_the_job(script: str) -> None:
    found = parsed(["--nnodes", "2", "--spares", "1", "--node-rank", "2", script], {}).rendezvous
    assert found is not None and (found.settings.most, found.spares, found.node_rank) == (2, 1, 2)
    assert parsed(["--spares", "0", script], {}).rendezvous is None


def test_several_nodes_use_the_store_of_rank_0_or_of_an_endpoint(script: str) -> None:
    static = parsed(["--nnodes", "2", "--node-rank", "1", "--master-addr", "head", script], {}).rendezvous
    assert static is not None and static.settings.endpoint == "head:29500" and static.node_rank == 1
    assert static.node_timeout_seconds == 10.0
    # The name or address of a node does not always show that the store is there, and another job may have the port.
    for number, is_host in ((0, "true"), (1, "false")):
        found = parsed(
            ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "10.0.0.1", script], {}
        ).rendezvous
        assert found is not None and found.settings.configuration["is_host"] == is_host
    elastic = ["--nnodes", "2:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "head:1", "--rdzv-conf"]
    c10d = parsed([*elastic, "keep_alive_interval=3", script], {}).rendezvous
    assert c10d is not None and (c10d.settings.least, c10d.settings.most, c10d.node_rank) == (2, 4, None)
    assert c10d.node_timeout_seconds == 15.0 and c10d.settings.endpoint == "head:1"
