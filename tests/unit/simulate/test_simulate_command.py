"""The command line of the simulator: output, and refusals with a sentence and exit code 64."""

import json
from pathlib import Path

import pytest
import yaml

from trainium_contract.exit_codes import ExitCode
from trainium_simulator.command import main, parse_counts, parse_rates
from trainium_simulator.errors import InputError
from trainium_simulator.job import build_spec, read_job
from trainium_simulator.stages import StageTimes, learn_stages, read_stages
from trainium_simulator.virtual.failures import FailureModel
from trainium_simulator.virtual.schedule import read_trace

JOB = {
    "apiVersion": "trainium.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "small"},
    "spec": {
        "workers": {"replicas": 4, "spares": 1, "accelerator": {"device": "cpu"}},
        "parallelism": {"tensor": 2},
        "trainer": {"batch": {"globalSize": 24}},
    },
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def write_file(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def assert_rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == ExitCode.USER_ERROR
    out = capsys.readouterr()
    assert out.out == ""
    assert "Traceback" not in out.err
    return out.err


def test_json_lists_every_case_and_the_same_seeds_give_the_same_answer(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(job), "--spares", "0..1", "--failures-per-1000-node-days", "100", "--days", "2", "--seeds", "2"]
    assert main([*arguments, "-o", "json", "--goal", "0.5"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*arguments, "-o", "json", "--goal", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out) == first

    assert [result["spares"] for result in first["results"]] == [0, 1]
    for result in first["results"]:
        assert 0 < result["workDone"]["mean"] <= 1
        assert result["mix"] == "AllCauses"
        assert result["goal"] == {"ratio": 0.5, "reached": True}
    assert first["results"][0]["spareGain"] is None
    assert first["results"][1]["spareGain"]["heldNodeHours"] == 720


def test_a_table_shows_what_a_spare_buys_and_which_stage_to_shorten(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_file(tmp_path, "trace.csv", "seconds,class,node,duration\n3600,NodeLost,1,7200\n")
    assert main([str(job), "--spares", "0,1", "--trace", trace, "--days", "1", "--goal", "0.999"]) == 0
    output = capsys.readouterr().out

    assert "What a spare buys" in output
    assert "missed; most is lost in Decide (wait for a worker), " in output
    assert "NodeLost" in output
    assert "reached." in output


def test_slow_steps_are_named_as_the_largest_loss(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_file(tmp_path, "trace.csv", "seconds,class,node,duration\n3600,Straggler,1,7200\n")
    assert main([str(job), "--spares", "0", "--trace", trace, "--days", "1", "--goal", "0.999"]) == 0
    assert "missed; most is lost to Overhead (slower steps), " in capsys.readouterr().out


def test_costs_cover_held_nodes_and_their_work(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_file(tmp_path, "trace.csv", "seconds,class,node,duration\n3600,NodeLost,1,7200\n")
    arguments = [str(job), "--spares", "1", "--trace", trace, "--days", "1", "--price-per-node-hour", "2.5"]
    assert main([*arguments, "-o", "json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    cost, nodes = result["cost"], result["nodes"] + 1

    assert cost["monthlyNodeHours"] == pytest.approx(nodes * 720, rel=0.1)
    assert cost["perMonth"] == pytest.approx(2.5 * cost["monthlyNodeHours"], abs=1)
    assert cost["lostOrIdle"] == pytest.approx(cost["perMonth"] * (1 - result["fleetRatio"]["mean"]), abs=1)
    assert cost["perMonthOfWork"] == pytest.approx(cost["perMonth"] / result["workDone"]["mean"], abs=1)
    assert main(arguments) == 0
    assert "Cost of a month, at 2.5 a node-hour" in capsys.readouterr().out


def test_a_field_of_the_job_can_be_varied(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(job), "--failures-per-1000-node-days", "0", "--days", "0.1", "--seeds", "1", "-o", "json"]
    assert main([*arguments, "--vary", "recovery.rescaleAfterSeconds=60,600"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["variation"] for result in results] == [
        "recovery.rescaleAfterSeconds=60",
        "recovery.rescaleAfterSeconds=600",
    ]


def test_a_picture_is_drawn(job: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    arguments = [str(job), "--failures-per-1000-node-days", "50", "--days", "1", "--seeds", "2", "--spares", "0,1"]
    assert main([*arguments, "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--failures-per-1000-node-days", "4,-1"), "must be from 0 to 100,000"),
        (("--failures-per-1000-node-days", "often"), "must be numbers such as 4,22"),
        (("--spares", "4..0"), "a range must ascend"),
        (("--spares", "two"), "must be like 2, 0,2,4 or 0..4"),
        (("--days", "0"), "--days must be above 0"),
        (("--seeds", "0"), "--seeds must be from 1"),
        (("--goal", "99.9"), "--goal must be between 0 and 1"),
        (("--price-per-node-hour", "-2"), "--price-per-node-hour must be 0 or more"),
        (("-o", "yaml"), "--output must be table or json"),
        (("--nodes", "5"), "cannot train on 5 nodes"),
        (("--vary", "recovery"), "must be FIELD=VALUE,VALUE"),
        (("--vary", "recovery.rescaleAfter=1"), "recovery.rescaleAfter"),
        (("--spares", "0..64", "--failures-per-1000-node-days", "1,2,3,4"), "cases, more than"),
        (("--colour", "red"), "No such option"),
        (("--trace", "nowhere.csv"), "nowhere.csv cannot be read"),
    ],
)
def test_an_invalid_option_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in assert_rejected(capsys, str(job), *arguments)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("seconds,class,node\n1,Fire,0\n", "line 2: unknown class 'Fire'; known are ProcessCrash"),
        ("seconds,class,node\n5,Hang,0\n1,Hang,0\n", "line 3: second 1 comes after second 5; sort the trace"),
        ("seconds,class,node\n-5,Hang,0\n", "line 2: seconds must be 0 or more"),
        ("seconds,class,node\nnan,Hang,0\n", "line 2: seconds must be 0 or more"),
        ("seconds,class,node\nsoon,Hang,0\n", "line 2: seconds must be a number, not 'soon'"),
        ("seconds,class,node\n5,Hang,9\n", "node 9 is none of the 5 nodes"),
        ("when,what\n5,Hang\n", "must name the columns seconds, class, node"),
        ("seconds,class,node,why\n5,Hang,0,x\n", "unknown column 'why'"),
        ("seconds,class,node,duration\n5,NodeLost,0,-1\n", "duration must be 0 or more"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, words: str
) -> None:
    assert words in assert_rejected(capsys, str(job), "--trace", write_file(tmp_path, "trace.csv", rows))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Job\nspec: {}\n", "is no TrainingJob"),
        ("kind: TrainingJob\n", "has no spec"),
        ("kind: [", "is not YAML"),
        ("kind: TrainingJob\nspec: {workers: {replicas: 0}}\n", "spec: workers.replicas"),
        ("kind: TrainingJob\nspec: {wrokers: {}}\n", "spec: wrokers"),
    ],
)
def test_a_job_that_does_not_validate_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    assert words in assert_rejected(capsys, write_file(tmp_path, "job.yaml", text))


def test_stages_and_models_are_read_from_files_and_mistakes_in_them_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_file(tmp_path, "stages.yaml", "restartSeconds: 7\nstepSeconds: 3\n")
    assert read_stages(Path(good), StageTimes()).restart_seconds == 7
    assert StageTimes().step_seconds != 3

    bad = write_file(tmp_path, "bad.yaml", "restartSecond: 7\n")
    assert "Known are compileSeconds" in assert_rejected(capsys, str(job), "--stages", bad)
    negative = write_file(tmp_path, "negative.yaml", "restartSeconds: -7\n")
    assert "restartSeconds" in assert_rejected(capsys, str(job), "--stages", negative)
    model = write_file(tmp_path, "model.yaml", "lemonShare: 2\n")
    assert "lemonShare" in assert_rejected(capsys, str(job), "--model", model)


def test_stages_are_learned_from_the_history_of_a_job(tmp_path: Path) -> None:
    entry = {
        "generation": 1,
        "time": "2026-01-01T00:00:00Z",
        "cause": "Crash",
        "response": "InPlace",
        "detectedSeconds": 0.5,
        "recoveredSeconds": 21.0,
    }
    history = [
        {**entry, "attempt": number, "stages": {"detect": 0.5, "restart": restart, "load": 9.0, "replay": 1.0}}
        for number, restart in enumerate((4.0, 5.0, 60.0))
    ]
    status = {"history": history, "goodput": {"sizes": [{"size": 4, "steps": 10, "stepSeconds": 2.5}]}}
    path = Path(write_file(tmp_path, "job.yaml", yaml.safe_dump({**JOB, "status": status})))

    learnt = learn_stages(path, StageTimes())

    assert (learnt.step_seconds, learnt.restart_seconds, learnt.load_memory_seconds) == (2.5, 5.0, 9.0)
    assert learnt.pod_seconds == StageTimes().pod_seconds


def _learn(tmp_path: Path, *entries: dict[str, object]) -> StageTimes:
    usual = {"generation": 1, "time": "2026-01-01T00:00:00Z", "recoveredSeconds": 21.0}
    history = [{**usual, "attempt": number, **entry} for number, entry in enumerate(entries)]
    status = {"history": history, "goodput": {"sizes": [{"size": 4, "steps": 10, "stepSeconds": 2.0}]}}
    return learn_stages(Path(write_file(tmp_path, "job.yaml", yaml.safe_dump({**JOB, "status": status}))), StageTimes())


def _entry(cause: str, response: str, restart: float, replay: float = 0.0, **more: object) -> dict[str, object]:
    return {"cause": cause, "response": response, "stages": {"restart": restart, "load": 1.0, "replay": replay}, **more}


def test_learning_accepts_a_history_longer_than_a_status_holds(tmp_path: Path) -> None:
    learnt = _learn(tmp_path, *(_entry("Crash", "InPlace", float(number)) for number in range(25)))

    assert learnt.restart_seconds == 12.0


def test_hangs_do_not_count_as_exit_detection_times(tmp_path: Path) -> None:
    hang = _entry("Hang", "InPlace", 1.0, detectedSeconds=15.0)
    assert _learn(tmp_path, hang).detect_exit_seconds == StageTimes().detect_exit_seconds
    crash = _entry("Crash", "InPlace", 1.0, detectedSeconds=0.2)
    assert _learn(tmp_path, hang, crash).detect_exit_seconds == 0.2


def test_publication_leaving_and_first_steps_are_learned_from_differences(tmp_path: Path) -> None:
    learnt = _learn(
        tmp_path,
        _entry("Crash", "InPlace", 1.0, 0.25),
        _entry("NodeLost", "Spare", 1.5, 0.75),
        _entry("Resize", "Resize", 4.0),
        _entry("NodeLost", "Spare", 1.5, 9.0, stepsLost=3),
    )

    assert (learnt.first_step_seconds, learnt.newcomer_step_seconds) == (0.25, 0.5)
    assert learnt.estimate_publication_seconds(4) == 0.5
    # 1 s of restart, 0.5 s of publication and half a step of 2 s are no leaving.
    assert learnt.leave_seconds == 1.5


def test_a_history_that_is_no_list_is_refused(tmp_path: Path) -> None:
    path = Path(write_file(tmp_path, "job.yaml", yaml.safe_dump({**JOB, "status": {"history": 7}})))
    with pytest.raises(InputError, match="history is no list"):
        learn_stages(path, StageTimes())


def test_a_trace_has_resizes_and_faults_without_a_node(tmp_path: Path) -> None:
    model = FailureModel()
    good = Path(write_file(tmp_path, "good.csv", "seconds,class,node,duration\n1,OperatorLost,,5\n2,Resize,4,60\n"))
    faults = read_trace(good, slots=4, model=model)
    assert [(fault.slot, fault.replicas, fault.duration) for fault in faults] == [(-1, 0, 5.0), (-1, 4, 60.0)]
    for size in ("0", "5", "2.5"):
        bad = Path(write_file(tmp_path, "bad.csv", f"seconds,class,node\n2,Resize,{size}\n"))
        with pytest.raises(InputError, match="from 1 to 4"):
            read_trace(bad, slots=4, model=model)


def test_learning_needs_a_status(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no status to learn from" in assert_rejected(capsys, str(job), "--learn-from", str(job))


def test_counts_and_rates_accept_ranges_and_lists() -> None:
    assert parse_counts("0..3") == (0, 1, 2, 3)
    assert parse_counts("2, 0,2") == (2, 0)
    assert parse_rates("4,22") == (4.0, 22.0)
    with pytest.raises(InputError):
        parse_rates("1e9")


def test_help_exits_with_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--spares" in capsys.readouterr().out


def test_a_simulated_job_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("kind: TrainingJob\nspec: {trainer: {epochs: 2}}\n")
    trainer = build_spec(path, read_job(path), nodes=None, spares=None, changes={}).trainer
    assert trainer is not None
    assert (trainer.steps, trainer.epochs) == (2**31 - 1, 0.0), "near its end a job would not grow back"
