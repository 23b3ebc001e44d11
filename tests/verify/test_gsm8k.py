# SPDX-License-Identifier: Apache-2.0
"""verify gsm8k: lm_eval itself against a server that answers as it is told; rules, files, what is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from kimi_k3.cli.application import run
from kimi_k3.errors import OperatorError
from kimi_k3.verify import harness
from kimi_k3.verify.asking import Api
from kimi_k3.verify.dataset import Dataset, read_dataset, write_dataset
from kimi_k3.verify.gsm8k import OWN_SHARE, answer_tokens, least_share, row_of, run_gsm8k
from kimi_k3.verify.harness import Score, reason
from kimi_k3.verify.keeping import Broken, read_results
from kimi_k3.verify.published import published
from kimi_k3.verify.questions import Example, final_answer, held_out_examples
from kimi_k3.verify.results import Result, State
from kimi_k3.verify.target import Target
from tests.verify.openai_server import Server, running

WORDS = held_out_examples(1, 28, family="word problem")
SHOWN, ASKED = WORDS[:12], WORDS[12:]
RESULTS = {one.question: str(final_answer(one.answer)) for one in WORDS}
STRICT = published()["gsm8k-strict-match"]


def files(directory: Path) -> Path:
    """A directory with train.jsonl and test.jsonl."""
    directory.mkdir()
    write_dataset(directory, SHOWN, ASKED)
    return directory


def question_of(body: dict[str, Any]) -> str:
    """The last question of a prompt."""
    return str(body["prompt"]).rpartition("Question: ")[2].removesuffix("\nAnswer:")


def completion(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"index": 0, "text": text}]})


def right(body: dict[str, Any]) -> tuple[int, str]:
    return completion(f" worked\n#### {RESULTS[question_of(body)]}\n\n")


def verified(
    server: Server, out: Path, *, dataset: Path | None, limit: int | None = None, concurrency: int = 2
) -> tuple[State, list[str]]:
    told: list[str] = []
    state = run_gsm8k(
        server.target,
        out,
        dataset=dataset,
        own=dataset is None,
        limit=limit,
        concurrency=concurrency,
        report=told.append,
    )
    return state, told


def kept_in(out: Path) -> Result:
    (result,) = read_results(out)
    return result


def shares(result: Result) -> dict[str, tuple[float, int | None]]:
    return {figure.name: (figure.value, figure.count) for figure in result.figures}


def test_parquet_is_asked_as_upstream_asked(tmp_path: Path) -> None:
    """lm_eval loads its own task over local files, and each request has the published settings."""
    import pyarrow
    import pyarrow.parquet as parquet

    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    for part, examples in (("train", SHOWN), ("test", ASKED)):
        rows = [{"question": one.question, "answer": one.answer} for one in examples]
        path = tmp_path / "gsm8k" / "main" / f"{part}-00000-of-00001.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with running(Server(right, card={"id": "kimi-k3", "max_model_len": 262_144})) as server:
        state, told = verified(server, tmp_path / "out", dataset=tmp_path / "gsm8k", limit=6)
    result = kept_in(tmp_path / "out")
    assert shares(result) == {"strict-match": (1.0, 6), "flexible-extract": (1.0, 6)}
    # Right as it all is, there is nothing to compare it with.
    assert state is result.state is State.NOT_RUN, told
    assert "not GSM8K" in told[-1]
    assert {question_of(body) for body in server.asked} == {one.question for one in ASKED[:6]}
    for body in server.asked:
        assert body["prompt"].count("Question: ") == 6
        assert (body["max_tokens"], body["temperature"], body["model"]) == (512, 0.0, "kimi-k3")
        assert body["stop"] == ["Question:", "</s>", "<|im_end|>"]
    # What lm_eval says it did is its own definition with other files.
    (path,) = (tmp_path / "out").rglob("results_*.json")
    loaded = json.loads(path.read_text())["configs"]["gsm8k"]
    own = yaml.safe_load(harness.definition().read_text())
    changed = {"dataset_path", "dataset_name", "generation_kwargs"}
    same = own.keys() - changed - {"tag", "metadata"}
    assert {"doc_to_text", "filter_list", "metric_list", "fewshot_split", "num_fewshot"} <= same
    assert {name: loaded[name] for name in same} == {name: own[name] for name in same}


def test_the_two_filters(tmp_path: Path) -> None:
    """An answer without #### is right by one filter only, a wrong one by neither, by lm_eval's own scores."""

    def answer(body: dict[str, Any]) -> tuple[int, str]:
        number = [one.question for one in ASKED].index(question_of(body))
        result = RESULTS[question_of(body)]
        return completion([f" #### {result}", f" It is {result}", " #### 123456"][min(number, 2)])

    with running(Server(answer)) as server:
        verified(server, tmp_path / "out", dataset=files(tmp_path / "data"), limit=4)
    result = kept_in(tmp_path / "out")
    assert shares(result) == {"strict-match": (0.25, 4), "flexible-extract": (0.5, 4)}
    assert result.figures[0].standard_error == pytest.approx(0.25)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_server_that_goes_away(tmp_path: Path, concurrency: int) -> None:
    """One line says what happened; the answers until then are scored, and nothing else counts as asked."""
    answered: list[str] = []

    def answer(body: dict[str, Any]) -> tuple[int, str] | None:
        if "max_tokens" not in body:
            return 404, "{}"
        # From two threads at once, but only one of them gets the last place.
        if len(answered) >= 5:
            return None
        answered.append(question_of(body))
        return right(body) if len(answered) != 2 else completion(" #### 123456")

    with running(Server(answer)) as server, pytest.raises(OperatorError) as caught:
        verified(server, tmp_path / "out", dataset=files(tmp_path / "data"), concurrency=concurrency)
    assert "verify gsm8k: the server is gone" in str(caught.value)
    assert "\n" not in str(caught.value)
    result = kept_in(tmp_path / "out")
    assert (result.state, result.ended) == (State.FAIL, None)
    assert "the server is gone" in (result.broken_off or "")
    assert shares(result) == {"strict-match": (0.8, 5), "flexible-extract": (0.8, 5)}
    assert {row.state for row in result.rows} == {State.NOT_RUN}
    assert result.settings["questions"] == len(ASKED)


def test_a_server_that_answers_with_errors(tmp_path: Path) -> None:
    """The server's own words are in the line, and that nothing was answered in the result."""

    def answer(body: dict[str, Any]) -> tuple[int, str]:
        return 500, '{"error": "out of\\nmemory"}'

    with running(Server(answer)) as server, pytest.raises(OperatorError) as caught:
        verified(server, tmp_path / "out", dataset=files(tmp_path / "data"), limit=2)
    assert "the server answers with an error" in str(caught.value)
    assert "500" in str(caught.value)
    assert "memory" in str(caught.value)
    assert shares(kept_in(tmp_path / "out")) == {"answered": (0, 2)}


def test_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    """lm_eval's caches are megabytes that nobody looks at; the evidence beside them stays."""
    killed = tmp_path / "out" / "gsm8k" / "20261202T000000.000000"
    (killed / "scratch").mkdir(parents=True)
    (killed / "scratch" / "answers_rank0.db").touch()
    (killed / "lm_eval.log").touch()
    with running(Server(right)) as server:
        verified(server, tmp_path / "out", dataset=files(tmp_path / "data"), limit=2)
    assert [path.name for path in killed.iterdir()] == ["lm_eval.log"]
    assert not list((tmp_path / "out").rglob("scratch"))


def test_nothing_to_ask(tmp_path: Path) -> None:
    """Without questions nothing is guessed and nothing downloaded: the line says where to get them."""
    with running(Server(right)) as server:
        asking = ["verify", "gsm8k", "--no-sidecar", "--engine", server.url, "--out", str(tmp_path)]
        with pytest.raises(OperatorError, match="hf download openai/gsm8k"):
            run_gsm8k(
                server.target,
                tmp_path,
                dataset=None,
                own=False,
                limit=None,
                concurrency=1,
                report=lambda _: None,
            )
        assert run(asking) == 2
        assert run([*asking, "--own", "--dataset", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_without_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run is no pass, and the line says what to install."""
    monkeypatch.setattr(harness, "version", lambda: None)
    with running(Server(right)) as server:
        state, told = verified(server, tmp_path, dataset=None)
    assert state is kept_in(tmp_path).state is State.NOT_RUN
    assert "pip install 'kimi-k3-gfx942[verify]'" in told[-1]


def pointer(directory: Path) -> None:
    (directory / "main").mkdir()
    for part in ("train", "test"):
        (directory / "main" / f"{part}-0.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")


def lines(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for part in ("train", "test"):
            (directory / f"{part}.jsonl").write_text(text)

    return write


NO_DATASET: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda _: None, "holds neither"),
    "only one part": (lambda one: (one / "train.jsonl").touch(), "holds neither"),
    "a pointer of git-lfs": (pointer, "cannot be read"),
    "no JSON": (lines("question,answer\n"), "cannot be read"),
    "other fields": (lines('{"problem": "1+1"}\n'), "not every line"),
    "no result": (lines('{"question": "1+1", "answer": "2"}\n'), "not every line"),
    "too few to show": (lines('{"question": "1+1", "answer": "#### 2"}\n'), "train has 1 questions"),
}


@pytest.mark.parametrize("case", NO_DATASET)
def test_no_dataset(tmp_path: Path, case: str) -> None:
    """Each way in which files are not GSM8K is one line with how to get it, before anybody is asked."""
    write, said = NO_DATASET[case]
    write(tmp_path)
    with pytest.raises(OperatorError, match=said) as caught:
        read_dataset(tmp_path, 5)
    assert "hf download" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gsm8k_is_told_by_its_size() -> None:
    """The published figure stands beside all 1,319 questions with 7,473 to draw shots from, and no others."""
    one = Example("gsm8k", "1+1", "#### 2")
    assert Dataset("json", (), (), (one,) * 7473, (one,) * 1319).is_gsm8k
    assert not Dataset("json", (), (), (one,) * 7472, (one,) * 1319).is_gsm8k
    assert not Dataset("json", (), (), (one,) * 7473, (one,) * 1318).is_gsm8k


@pytest.mark.parametrize(
    ("correct", "count", "state"),
    [
        (1319, 1319, State.PASS),
        (1266, 1319, State.PASS),
        (1236, 1319, State.PASS),
        (1235, 1319, State.FAIL),
        (8, 10, State.PASS),
        (5, 10, State.FAIL),
        (0, 10, State.FAIL),
    ],
)
def test_compared_with_the_published_figure(correct: int, count: int, state: State) -> None:
    """Three combined standard errors, also where few questions make our own error large or nothing."""
    row = row_of(False, "strict-match", Score(correct / count, None, count), 1319, STRICT)
    assert row.state is state, row.evidence
    assert "published 0.9598" in row.evidence
    assert ("questions only" in row.evidence) is (count != 1319)


def test_the_least_share() -> None:
    """By hand: 0.9598 - 3 * sqrt(0.9598 * 0.0402 / 1319 + 0.0054^2)."""
    assert least_share(STRICT, 1319) == pytest.approx(0.936872, abs=1e-6)


def test_own_questions() -> None:
    """The miniature's rule is its own: 95 % of the questions, however few."""
    assert OWN_SHARE == 0.95
    states = [row_of(True, "strict-match", Score(n / 20, 0.0, 20), 20, None).state for n in (20, 19, 18)]
    assert states == [State.PASS, State.PASS, State.FAIL]


class Limited:
    """A server with a length limit that counts a token for each byte; or does not say."""

    def __init__(self, limit: int | None, tells: bool = True) -> None:
        self._limit, self._tells = limit, tells

    def length_limit(self) -> int | None:
        return self._limit

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if not self._tells:
            raise Broken("/tokenize: HTTP 404")
        assert path == "/tokenize"
        return {"count": len(body["prompt"]) // 2}


def test_room_for_an_answer() -> None:
    """512 tokens wherever they fit, fewer by the server's own count; too few is an error, not a bad score."""
    data = Dataset("json", (), (), tuple(SHOWN), tuple(ASKED))
    prompt = data.longest_prompt(5)
    assert prompt.count("Question: ") == 6
    half = len(prompt) // 2
    given = {None: 512, 100_000: 512, half + 16 + 512: 512, half + 16 + 511: 511, half + 16 + 64: 64}
    found = {limit: answer_tokens(data, cast(Api, Limited(limit))) for limit in given}
    assert found == given
    assert answer_tokens(data, cast(Api, Limited(100, tells=False))) == 512
    with pytest.raises(OperatorError, match="--max-model-len"):
        answer_tokens(data, cast(Api, Limited(half + 16 + 63)))


def target_at(url: str, **changes: Any) -> Target:
    common = {"sidecar": None, "metrics": "", "weights": None, "api_key": None, "token": None}
    return Target(engine=url, **{**common, **changes})


def test_environment(tmp_path: Path) -> None:
    """The server gets its own key and no other; no proxy, no hub, no .netrc is in between."""
    around = {
        "PATH": "/bin",
        "OPENAI_API_KEY": "somebody else's",
        "HF_TOKEN": "secret",
        "https_proxy": "http://proxy",
        "ALL_PROXY": "http://proxy",
        "KIMI_K3_API_KEY": "ours",
    }
    told = harness.environment(target_at("https://k3.example", api_key="ours"), tmp_path, around)
    assert (told["PATH"], told["OPENAI_API_KEY"], told["HF_HUB_OFFLINE"]) == ("/bin", "ours", "1")
    assert not {"HF_TOKEN", "https_proxy", "ALL_PROXY", "KIMI_K3_API_KEY", "SSL_CERT_FILE"} & told.keys()
    assert harness.environment(target_at("http://k3.example"), tmp_path, around)["OPENAI_API_KEY"] == ""
    trusting = target_at("https://k3.example", authorities=tmp_path / "ca.pem")
    told = harness.environment(trusting, tmp_path, around)
    assert {told["SSL_CERT_FILE"], told["REQUESTS_CA_BUNDLE"]} == {str(tmp_path / "ca.pem")}


@pytest.mark.parametrize(("url", "checked"), [("https://k3.example", True), ("https://127.0.0.1:1", False)])
def test_certificates(tmp_path: Path, url: str, checked: bool) -> None:
    """lm_eval checks certificates where our own requests do; the key is not among its settings."""
    asking = harness.Run(tmp_path, tmp_path, "gsm8k", "kimi-k3", 1, 512, None)
    settings = harness.configuration(asking, target_at(url, api_key="ours"))
    assert settings["model_args"]["verify_certificate"] is checked
    assert "ours" not in json.dumps(settings)


TRACEBACK = "Traceback (most recent call last):\n  File x\n"
LOGS = {
    "": "lm_eval ended: without a word",
    "Killed\n": "lm_eval ended: Killed",
    TRACEBACK + "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected\n": (
        "the server is gone (Server disconnected)"
    ),
    TRACEBACK + "http.client.RemoteDisconnected: Remote end\n" + TRACEBACK + "x.ProtocolError: y\n": (
        "the server is gone (Remote end)"
    ),
    "WARNING API request failed! Status code: 400, Response text: too long. Retrying...\n"
    + TRACEBACK
    + "aiohttp.client_exceptions.ClientResponseError: 400, message='Bad Request'\n": (
        "the server answers with an error: Status code: 400, Response text: too long."
    ),
    TRACEBACK + "ModuleNotFoundError: No module named 'tenacity'\nUnclosed client session\n": (
        "lm_eval ended: ModuleNotFoundError: No module named 'tenacity'"
    ),
    TRACEBACK
    + "asyncio.exceptions.CancelledError\n"
    + TRACEBACK
    + "TimeoutError\n": "no answer within 600 s",
}


@pytest.mark.parametrize("log", LOGS)
def test_reason(log: str) -> None:
    """Of hundreds of lines of lm_eval's the one that an operator needs."""
    assert reason(log) == LOGS[log]


def test_results_of_another_version(tmp_path: Path) -> None:
    """A result that is not understood is no score of zero."""
    with pytest.raises(Broken, match=re.escape("wrote no results_*.json")):
        harness.read_scores(tmp_path, "gsm8k")
    (tmp_path / "results_1.json").write_text(json.dumps({"results": {"gsm8k": {}}}))
    with pytest.raises(Broken, match="not what lm_eval"):
        harness.read_scores(tmp_path, "gsm8k")
