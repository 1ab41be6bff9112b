"""The page in a browser, on the built-in model: what is shown is what the server did."""

import re
from itertools import pairwise

import httpx
import pytest

PROMPT = "class Stack:\n    def __init__(self):"
MAX_TOKENS = 64


@pytest.fixture
def stack(visit, live_server):
    """The page, set up for a short greedy answer, with the panel open."""
    page = visit(live_server.url)
    page.until("state.kind === 'text'")
    page.set("max-tokens", MAX_TOKENS)
    page.set("temperature", 0)
    page.look_inside()
    return page


def complete(url, **fields):
    """The same answer without the page."""
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_is_coloured_and_counted(stack, live_server):
    stack.ask(PROMPT)
    expected = complete(live_server.url)
    tokens = stack.tokens()
    assert stack.answer() == "".join(text for text, _ in tokens) == expected["choices"][0]["text"]
    assert len(tokens) == stack.number("#figure-tokens") == MAX_TOKENS

    origins = [origin for _, origin in tokens]
    assert origins[0] == "plain" and "bonus" in origins and {"d1", "d2"} <= set(origins)
    for before, origin in pairwise(origins):  # a draft of depth 2 follows its parent
        assert not re.fullmatch("d[2-5]", origin) or before == f"d{int(origin[1]) - 1}"
    for origin in ("d1", "d2", "bonus", "plain"):
        assert stack.number(f"#legend [data-origin={origin}] .count") == origins.count(origin)

    speculation = expected["metrics"]["speculative_decoding"]
    assert stack.number("#figure-accept") == pytest.approx(speculation["mean_acceptance_length"], abs=0.006)
    assert stack.number("#figure-share") == pytest.approx(100 * speculation["num_accepted_draft_tokens"] / MAX_TOKENS, abs=0.6)
    assert stack.number("#figure-speed") > 1 and stack.number("#figure-first") > 0
    assert "max tokens" in stack.text(".turn:last-child .note")
    stack.screenshot("answer")


def test_the_tree_shows_the_accepted_path(stack):
    stack.ask(PROMPT)
    cycles = stack.evaluate("state.inspected.run.cycles")
    path = "[...document.querySelectorAll('.node:not(.rejected)')].map(node => JSON.parse(node.firstChild.textContent))"

    def check(cycle):
        tree, texts = cycle["tree"], [token["text"] for token in cycle["tokens"]]
        nodes = stack.page.evaluate(path)
        assert nodes[: 1 + len(texts)] == [tree["tokens"][0], *texts], "the last pass may be cut"
        assert nodes == [tree["tokens"][node] for node in tree["accepted"]] + texts[len(tree["accepted"]) - 1 :]
        assert stack.page.locator(".node.rejected").count() == len(tree["tokens"]) - len(tree["accepted"])
        assert stack.page.locator(".edge").count() == stack.page.locator(".node").count() - 1
        assert f"Pass {cycle['index'] + 1} of {len(cycles)}: {len(tree['accepted']) - 1} of 7 drafts" in stack.text("#tree-caption")

    check(cycles[-1])
    most = max(cycles, key=lambda cycle: len(cycle["tokens"]))
    assert len(most["tokens"]) > 3
    token = stack.page.locator(f".body .token[data-cycle='{most['index']}']").nth(1)
    token.scroll_into_view_if_needed()
    token.hover()
    check(most)
    assert "accepted draft, depth 2" in stack.text("#token-detail")
    marked = stack.page.locator(".body .marked").all_text_contents()
    assert marked == [token["text"] for token in most["tokens"]]
    stack.screenshot("tree")


def test_a_race_ends_with_identical_text(stack):
    stack.ask(PROMPT)
    stack.page.click("#race")
    stack.until_idle()
    assert stack.text("#verdict-same") == "✓ identical text"
    assert stack.text("#output-0") == stack.text("#output-1") == stack.answer() != ""
    assert {origin for _, origin in stack.tokens("#output-1")} == {"plain"} != {origin for _, origin in stack.tokens("#output-0")}
    ratio = stack.number("#verdict-on") / stack.number("#verdict-off")
    assert stack.number("#verdict-ratio") == pytest.approx(ratio, rel=0.05)
    assert re.fullmatch(r"With speculation .*s, without .*s", stack.page.get_attribute("#timeline", "aria-label") or "")
    stack.screenshot("race")


def test_stop_ends_the_request_on_the_server(stack):
    stack.set("max-tokens", 900)
    stack.type(PROMPT)
    stack.until("state.inspected.run?.tokens > 10")
    stack.page.click("#stop")
    stack.until_idle()
    assert stack.text(".turn:last-child .note") == "Stopped."
    assert 10 < stack.number("#figure-tokens") == len(stack.tokens()) < 900
    busy = "fetch('/v1/loads').then(answer => answer.json()).then(answer => answer.aggregate.total_reqs === 0)"
    stack.until(busy, seconds=10)
    assert stack.page.is_visible("#send")


def test_without_speculation_every_token_is_plain(stack, live_server):
    stack.page.click("#settings-open")
    stack.page.click("label:has(#speculate)")
    assert stack.page.is_disabled("#tree")
    stack.ask(PROMPT)
    assert {origin for _, origin in stack.tokens()} == {"plain"}
    assert stack.answer() == complete(live_server.url)["choices"][0]["text"]
    assert stack.text("#figure-accept") == "1.00" and stack.text("#figure-share") == "0%"


def test_another_compiled_tree_can_be_picked(stack):
    stack.page.click("#settings-open")
    stack.page.select_option("#tree", "3/1/4")
    stack.ask(PROMPT)
    assert stack.evaluate("state.inspected.run.cycles.filter(cycle => cycle.tree).every(cycle => cycle.tree.shape === '3/1/4')")
    assert stack.evaluate("state.inspected.run.cycles.some(cycle => cycle.tree)")


def test_a_refusal_is_shown_in_the_servers_words(stack):
    stack.set("max-tokens", 5000)
    stack.ask(PROMPT)
    assert "max_tokens asks for 5000 more, but the context length is 1024" in stack.text(".failure p")
    assert stack.page.get_attribute("#max-tokens", "aria-invalid") == "true"
    stack.expect_complaints("400")
    stack.set("max-tokens", 8)
    stack.ask(PROMPT)
    assert stack.page.is_hidden(".turn:last-child .failure") and stack.page.get_attribute("#max-tokens", "aria-invalid") is None


def test_a_chat_is_answered_by_the_chat_endpoint(stack, live_server):
    stack.page.click("#settings-open")
    stack.page.click("label:has(#chat-mode)")
    stack.ask(PROMPT)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS, "temperature": 0}
    expected = httpx.post(f"{live_server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert stack.answer() == expected["choices"][0]["message"]["content"] != ""
    assert {"d1", "bonus"} <= {origin for _, origin in stack.tokens()}
