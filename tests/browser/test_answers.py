"""Answers on the page: as text, as Markdown, hostile, failed, empty or not yet there; on a server without a model."""

import json
from itertools import pairwise

import pytest

from tests.browser.conftest import serving
from tests.browser.mock_server import CODE, HOSTILE, MARKDOWN, THINKING, UNICODE, create_mock


def test_markdown_becomes_elements_and_every_token_keeps_its_colour(visit, mock_url):
    page = visit(mock_url)
    page.ask("[markdown]")
    body = ".turn:last-child .body"
    assert page.text(f"{body} h4") == "A heading with weight"
    assert page.page.locator(f"{body} a").evaluate_all("links => links.map(link => [link.textContent, link.href, link.rel])") == [
        ["link", "https://example.com/", "noopener noreferrer"]
    ]
    assert page.page.locator(f"{body} > ol > li").count() == 2 and page.text(f"{body} ol ul strong") == "deeper"
    assert page.text(f"{body} pre code") == 'def reverse(text):\n    return text[::-1]  # "1. 2. 3."'
    assert page.page.locator(f"{body} td").all_text_contents() == ["a", "1"]
    assert "<b>markup</b> stays &amp; text." in page.text(body) and "[bad one](javascript:alert(1))" in page.text(body)
    # each piece of the rendered text is a piece of the token that it is coloured by
    shown = page.evaluate("[...document.querySelectorAll('.body .token')].map(one => [one.textContent, Number(one.dataset.start)])")
    starts = page.evaluate("state.inspected.run.pieces.map(piece => piece.start)") + [len(MARKDOWN)]
    tokens = {start: MARKDOWN[start:end] for start, end in pairwise(starts)}
    assert all(text in tokens[start] for text, start in shown)
    assert [start for _, start in shown] == sorted(start for _, start in shown)


def test_a_block_of_code_is_copied_alone(visit, mock_url):
    page = visit(mock_url, permissions=["clipboard-read", "clipboard-write"])
    page.ask("[markdown]")
    page.page.click("[data-action=copy-code]")
    page.until("document.querySelector('[data-action=copy-code]').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def reverse(text):")
    page.page.click(".turn:last-child footer [data-action=copy]")
    page.until("document.querySelector('.turn:last-child footer [data-action=copy]').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_thinking_is_folded_away_and_not_sent_back(visit, mock_url):
    page = visit(mock_url)
    page.ask("[thinks]")
    assert page.text(".thinking div") == THINKING and not page.page.is_visible(".thinking div")
    assert (CODE * 4).startswith(page.answer()) and page.tokens()[0][0].strip() == ""
    coloured = "".join(text for text, _ in page.tokens())  # from its own begin on
    assert "".join(coloured.split()) == "".join(page.answer().split())
    page.ask("And?")
    assert THINKING not in json.dumps(page.bodies[1])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("[503]", "1024 requests wait already and --max-queued-requests is 1024: try again later"),
        ("[400]", "temperature must be a number from 0 to 2, got 7"),
        ("[breaks]", "the engine failed while it worked on this request"),
        ("[ends early]", "The connection ended before the answer did."),
    ],
)
def test_failures_are_told_in_place(visit, mock_url, word, message):
    page = visit(mock_url)
    page.ask(word)
    assert page.text(".failure p") == message and page.page.is_visible("text=Try again")
    assert (page.page.get_attribute("#temperature", "aria-invalid") == "true") == (word == "[400]")
    assert (len(page.tokens()) > 5) == (word in ("[breaks]", "[ends early]")), "what came before is kept"
    page.expect_complaints("status of")
    page.ask("fine again")
    assert page.page.locator(".turn:last-child .failure").is_hidden()
    unanswered = word in ("[503]", "[400]")
    assert len(page.bodies[-1]["messages"]) == (1 if unanswered else 3), "what was not answered is no part of the chat"


@pytest.mark.parametrize(("limit", "reason"), [("", "first token was the one that ends"), ("1", "“max tokens”")])
def test_an_empty_answer_says_why(visit, mock_url, limit, reason):
    page = visit(mock_url)
    page.set("max-tokens", limit)
    page.ask("[empty]" if not limit else "[unicode]")
    assert reason in page.text(".turn:last-child .note")


def test_waiting_says_what_for(visit):
    app = create_mock(pace=0.002)
    app.state.programs = {"ready": 4, "total": 9, "seconds_left": 40}
    with serving(app) as url:
        page = visit(url)
        page.until("byId('model').textContent.includes('compiling: 4 of 9 programs, about 40 s left')")
        app.state.programs["seconds_left"] = None
        page.type("[waits]")
        page.until("document.querySelector('.waiting').textContent.includes('while the server compiles (4 of 9 programs)')")
        app.state.programs = {"ready": 9, "total": 9}
        app.state.waiting = 3
        page.until("document.querySelector('.waiting').textContent.startsWith('Waiting behind 2 other requests · ')")
        page.until("document.querySelector('.waiting').hidden", seconds=10)
        page.until_idle()
        page.until("!byId('model').textContent.includes('compiling')")


def test_hostile_text_stays_text(visit, mock_url):
    page = visit(mock_url)
    page.set("max-tokens", 500)
    page.ask("[hostile] <img src=x onerror=window.hacked=3>")
    assert page.answer() == HOSTILE * 3
    page.look_inside()
    assert "<b>" in page.evaluate("state.inspected.run.cycles.flatMap(cycle => cycle.tree?.tokens ?? [])")
    for cycle in range(int(page.evaluate("state.inspected.run.cycles.length"))):
        page.evaluate(f"selectCycle({cycle})")
    page.page.click("#race")
    page.until_idle()
    assert page.page.locator(".frame :is(img, script, b, iframe)").count() == 0
    assert page.evaluate("window.hacked") is None


DEEP_CELL = "| h |\n|---|\n| " + "~~a *b " * 300 + "x* y~~ " * 300 + " |"


@pytest.mark.parametrize(
    "text", ["> " * 3000 + "deep", "> " * 100 + "deep", "- " * 3000 + "deep", "*a " * 500, "[" * 3000, DEEP_CELL]
)
def test_markdown_nested_beyond_all_sense_is_shown_as_text(visit, mock_url, text):
    page = visit(mock_url)
    page.ask("Hello")
    script = """text => { const { view } = state.inspected;
        view.show({ text, pieces: [{ start: 0, origin: 'd1' }], offset: 0, run: null });
        const depth = (element) => 1 + Math.max(0, ...[...element.children].map(depth));
        return [view.box.textContent.replaceAll(/[^a-z]/g, ''), depth(view.box)] }"""
    shown, depth = page.evaluate(script, text)
    assert shown == "".join(filter(str.isalpha, text)) and depth < 60


def test_the_policy_refuses_html_and_programs_from_text(visit, mock_url):
    page, failures = visit(mock_url), []
    page.page.on("requestfailed", lambda request: failures.append((request.url, request.failure)))
    for script in (
        "document.body.innerHTML = '<b>bold</b>'",
        "document.body.append(make('script', { text: 'window.hacked = 1' }))",
        "(byId('legend').setAttribute('onclick', 'window.hacked = 1'), byId('legend').click())",
        "document.body.append(make('img', { src: 'http://127.0.0.1:9/' }))",
        "document.head.append(make('style', { text: 'body { color: red }' }))",
    ):
        before = len(page.complaints)
        page.evaluate(f"() => {{ try {{ {script} }} catch {{}} }}")
        page.until("true")
        assert len(page.complaints) > before, script
    assert page.evaluate("window.hacked") is None
    assert failures == [("http://127.0.0.1:9/", "csp")]
    page.complaints.clear()
    page.foreign.clear()


def test_characters_of_several_tokens_come_out_whole(visit, mock_url):
    page = visit(mock_url)
    page.set("max-tokens", 400)
    page.ask("[unicode]")
    assert page.answer() == UNICODE * 3
    assert "".join(text for text, _ in page.tokens()).strip() == (UNICODE * 3).strip()


def test_a_server_that_says_little_is_enough(visit):
    """No information but the model's name, and no trace: the text comes as plain tokens."""
    with serving(create_mock(pace=0.002, tells=False)) as url:
        page = visit(url)
        page.ask("[no trace]")
        assert page.answer() and (CODE * 4).startswith(page.answer())
        assert {origin for _, origin in page.tokens()} == {"plain"}
        page.expect_complaints("404")
