# SPDX-License-Identifier: Apache-2.0
"""The served model as an OpenAI client sees it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.serving.deployment import Deployment, Mode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize("deployment", [Mode(weights="int4")], indirect=True, ids=str, scope="module"),
]

QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a mixture of experts?"},
]


@pytest.fixture
def client(deployment: Deployment):  # type: ignore[no-untyped-def]
    with openai.OpenAI(
        base_url=f"{deployment.engine_url}/v1", api_key=deployment.api_key, timeout=300, max_retries=0
    ) as client:
        yield client


def _ask(client: openai.OpenAI, tokens: int = 24) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model="kimi-k3", messages=QUESTION, max_tokens=tokens, temperature=0
    )


def test_chat_completion_has_text_and_usage(client: openai.OpenAI) -> None:
    """The plain case, with the figures that bills and quotas are made of."""
    answer = _ask(client)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > len("Answer briefly.")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_every_answer_says_how_lossy_it_is(client: openai.OpenAI, deployment: Deployment) -> None:
    """Whoever compares answers must see where they come from, in streams and errors, too."""
    headers = client.chat.completions.with_raw_response.create(
        model="kimi-k3", messages=QUESTION, max_tokens=1, stream=True
    ).headers
    said = headers["x-kimi-k3-weights"]
    assert said.startswith("int4_per_group_32; lossy; rel_mse=0.00")
    conversion = httpx.get(f"{deployment.sidecar_url}/conversion").json()
    assert float(said.rpartition("=")[2]) == pytest.approx(conversion["total"]["relative_mse"], rel=5e-3)
    unauthorised = httpx.get(f"{deployment.engine_url}/v1/models")
    assert (unauthorised.status_code, unauthorised.headers["x-kimi-k3-weights"]) == (401, said)
    assert "x-kimi-k3-weights" not in httpx.get(f"{deployment.engine_url}/health").headers


def test_streaming_yields_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    """A chat window shows pieces; together they must be the answer that is given at once."""
    whole = _ask(client)
    pieces = list(
        client.chat.completions.create(
            model="kimi-k3",
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert sum(bool(piece.choices and piece.choices[0].delta.content) for piece in pieces) > 5
    assert pieces[-1].usage == whole.usage


def test_sixteen_concurrent_requests_are_all_answered_alike(client: openai.OpenAI) -> None:
    """Twice as many requests as slots: half of them wait, none is refused or mixed up."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: _ask(client).choices[0].message.content, range(16)))
    assert set(answers) == {_ask(client).choices[0].message.content}


def test_a_prompt_of_300_tokens(client: openai.OpenAI) -> None:
    """Longer than one block of the cache and than one chunk of the linear attention."""
    prompt = random.Random(0).choices(range(256), k=300)
    answer = client.completions.create(model="kimi-k3", prompt=prompt, max_tokens=16, temperature=0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (300, 16)


def test_a_wrong_model_name_is_not_found(client: openai.OpenAI) -> None:
    """A client of another deployment must not be answered by this one."""
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="kimi-k2", messages=QUESTION)
    assert error.value.status_code == 404


def test_a_missing_or_wrong_key_is_unauthorised(deployment: Deployment) -> None:
    """The key that the supervisor hands over must really guard the API."""
    with (
        openai.OpenAI(base_url=f"{deployment.engine_url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as error,
    ):
        _ask(stranger)
    assert error.value.status_code == 401
    body = {"model": "kimi-k3", "messages": QUESTION}
    keyless = httpx.post(f"{deployment.engine_url}/v1/chat/completions", json=body, timeout=30)
    assert keyless.status_code == 401


def test_text_does_not_depend_on_company(deployment: Deployment) -> None:
    """24 requests of mixed length at 8 slots: vLLM's CPU runner used to wipe other requests' cache blocks."""
    chooser = random.Random(7)
    prompts = [chooser.choices(range(256), k=chooser.choice([5, 17, 40, 130, 260, 420])) for _ in range(24)]
    alone = [deployment.complete(prompt, 40) for prompt in prompts]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda prompt: deployment.complete(prompt, 40), prompts))
    assert together == alone


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/v1/models", "/load", "/nonexistent"])
def test_no_path_answers_without_the_key(deployment: Deployment, path: str) -> None:
    """vLLM alone guards some prefixes only; a completion through /invocations needs no key there."""
    body = {"model": "kimi-k3", "messages": QUESTION, "prompt": "x", "max_tokens": 2}
    assert httpx.post(deployment.engine_url + path, json=body, timeout=30).status_code == 401


def test_probes_need_no_key(deployment: Deployment) -> None:
    """The supervisor, the sidecar, kubelet and Prometheus have none."""
    for path in ("/health", "/metrics"):
        assert httpx.get(deployment.engine_url + path, timeout=30).status_code == 200
