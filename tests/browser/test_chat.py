"""The page as a chat, on a server without a model: asking, asking again, finding it all after a reload."""

import json
from pathlib import Path

import pytest

from tests.browser.conftest import SIZES, serving
from tests.browser.mock_server import CODE, MARKDOWN, create_mock


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_conversation_from_the_first_question_to_the_next_visit(visit, mock_url, size, scheme):
    width, height = SIZES[size]
    page = visit(mock_url, width=width, height=height, color_scheme=scheme)
    page.screenshot("empty")
    page.ask("A formatted answer, please [markdown]")
    assert page.answer() == MARKDOWN
    assert page.page.locator(".body :is(strong, ol li, pre code, table td, blockquote)").count() > 6
    page.screenshot("answer")

    page.ask("And once more")
    first, answer = page.bodies[1]["messages"][1], page.answer()
    assert first == {"role": "assistant", "content": MARKDOWN}
    page.page.click("text=Regenerate")
    page.until_idle()
    assert page.bodies[2]["messages"] == page.bodies[1]["messages"] and page.page.locator(".turn").count() == 4

    page.page.click(".turn:last-child .figure")
    assert page.page.is_visible("#inside") and page.page.locator(".node.accepted").count() > 0
    assert f"The model ran {page.evaluate('state.inspected.run.verified.cycles')} times for" in page.text("#explained")
    assert not page.overflows()
    page.screenshot("inside")
    page.page.keyboard.press("Escape")
    assert page.page.is_hidden("#panel")

    page.reload()
    assert page.answer() == answer and page.page.locator(".turn").count() == 4
    assert page.text(".turn:first-child .bubble") == "A formatted answer, please [markdown]"
    assert page.tokens(), "the colours are kept, too"
    page.ask("Goes on")
    assert len(page.bodies[3]["messages"]) == 5
    box = page.page.locator("#message").bounding_box()
    assert box["y"] + box["height"] < height, "the box is in reach"


def test_a_killed_server_costs_nothing_that_was_said(visit):
    app = create_mock(pace=0.02)
    with serving(app) as url:
        page = visit(url)
        page.ask("Before")
        page.type("[slow] Please")
        page.until("document.querySelectorAll('.turn:last-child .token').length > 5")
    page.until_idle()
    assert page.text(".failure p") == "The connection ended before the answer did."
    said = page.answer()
    assert said and page.text(".turn:nth-child(3) .bubble") == "[slow] Please"
    page.page.click("text=Try again")
    page.until_idle()
    assert page.text(".failure p") == "Can't connect to the server." and page.answer() == said
    with serving(create_mock(pace=0.002), port=int(url.rpartition(":")[2])):
        page.page.click("text=Try again")
        page.until_idle()
        assert page.page.is_hidden(".turn:last-child .failure")
        assert page.answer().startswith(said) and page.page.locator(".turn").count() == 4
    page.expect_complaints("net::ERR")


def test_enter_sends_and_shift_enter_breaks_the_line(visit, mock_url):
    page = visit(mock_url)
    page.page.focus("#message")
    page.page.keyboard.type("one")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("two")
    page.page.keyboard.press("Enter")
    page.until("state.conversation.messages.length === 2")
    page.until_idle()
    assert page.bodies[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    assert page.page.input_value("#message") == ""
    assert page.evaluate("document.activeElement.id") == "message"
    page.page.keyboard.press("Enter")
    assert len(page.bodies) == 1, "nothing was written"


def test_all_of_it_by_the_keyboard(visit, mock_url):
    """Tab, Enter, Space, arrows and Escape are enough, and what is focused can be seen."""
    page = visit(mock_url)
    keys = page.page.keyboard

    def tab_to(what):
        for _ in range(40):
            keys.press("Tab")
            if page.evaluate(f"document.activeElement.matches({json.dumps(what)})"):
                assert page.evaluate(
                    "getComputedStyle(document.activeElement).outlineStyle !== 'none' || document.activeElement.id === 'message'"
                )
                return
        raise AssertionError(f"no way to {what}")

    tab_to("#message")
    keys.type("[markdown]")
    keys.press("Enter")
    page.until("state.conversation.messages.length === 2")
    page.until_idle()
    for target in ("[data-action=edit]", "[data-action=copy-code]", "[data-action=inspect]"):
        page.page.focus("#sidebar-open")
        tab_to(target)
    keys.press("Enter")
    assert page.evaluate("document.activeElement.id") == "inside-title"
    tab_to("#strip")
    keys.press("Home")
    keys.press("ArrowRight")
    assert page.text("#tree-caption").startswith("Pass 2 of ") and page.page.get_attribute("#strip", "aria-valuenow") == "2"
    assert page.page.locator(".body .marked").count() > 0
    keys.press("Escape")
    assert page.page.is_hidden("#panel") and page.evaluate("document.activeElement.id") == "inside-open"
    tab_to("#message")
    keys.type("[slow]")
    keys.press("Enter")
    page.until("document.querySelectorAll('.turn:last-child .token').length > 3")
    keys.press("Escape")
    page.until_idle()
    assert page.text(".turn:last-child .note") == "Stopped." and page.answer()


def test_stop_keeps_what_was_written(visit, mock_url):
    page = visit(mock_url)
    page.type("[slow]")
    page.until("document.querySelectorAll('.turn:last-child .token').length > 5")
    assert page.page.is_hidden("#send")
    page.page.click("#stop")
    page.until_idle()
    assert (CODE * 4).startswith(page.answer()) and page.page.is_visible("#send")


def test_an_edited_question_replaces_what_followed(visit, mock_url):
    page = visit(mock_url)
    page.ask("First")
    page.ask("Second")
    page.page.hover(".turn:first-child")
    page.page.click(".turn:first-child [data-action=edit]")
    page.page.fill(".edit textarea", "Better")
    page.page.click("text=Send again")
    page.until_idle()
    assert page.bodies[-1]["messages"] == [{"role": "user", "content": "Better"}]
    assert page.page.locator(".bubble").all_text_contents() == ["Better"]
    page.page.hover(".turn:first-child")
    page.page.click(".turn:first-child [data-action=edit]")
    page.page.click("text=Cancel")
    assert page.page.locator(".edit").count() == 0 and len(page.bodies) == 3
    page.page.hover(".turn:first-child")
    page.page.click(".turn:first-child [data-action=edit]")
    page.page.focus("text=Cancel")
    page.page.keyboard.press("Enter")
    assert page.page.locator(".edit").count() == 0 and len(page.bodies) == 3, "Enter presses the button"


def test_two_tabs_of_one_conversation_have_the_same_turns(visit, mock_url):
    page = visit(mock_url)
    page.ask("First")
    page.page.click("#new")
    with page.page.context.expect_page() as opened:
        page.evaluate("window.open(location.pathname)")
    other = opened.value
    other.wait_for_selector("#conversations [data-action=open]")
    other.click("#conversations [data-action=open]")
    other.fill("#message", "Second")
    other.press("#message", "Enter")
    other.wait_for_selector(".turn:nth-child(4) .actions [data-action=again]")
    page.page.click("#conversations [data-action=open]")
    assert page.page.locator(".turn").count() == 4
    page.ask("Third")
    assert [each["content"] for each in page.bodies[-1]["messages"] if each["role"] == "user"] == ["First", "Second", "Third"]
    other.wait_for_selector(".turn:nth-child(6)")


def test_an_answer_that_a_crash_cut_off_can_be_had_again(visit, mock_url):
    page = visit(mock_url)
    page.ask("Hello")
    script = """() => { const { conversation } = state, key = `jaxspec-chat-${conversation.id}`;
        const { end, ...cut } = conversation.messages[1];
        localStorage.setItem(key, JSON.stringify({ ...conversation, messages: [conversation.messages[0], cut] })) }"""
    page.evaluate(script)
    page.reload()
    assert page.text(".turn:last-child .note") == "Stopped."
    page.page.click("text=Regenerate")
    page.until_idle()
    assert len(page.bodies) == 2


def test_conversations_are_listed_opened_and_deleted(visit, mock_url):
    page = visit(mock_url)
    page.ask("The first conversation")
    page.page.click("#new")
    assert page.page.is_visible("#welcome")
    page.ask("The second conversation")
    titles = page.page.locator("#conversations [data-action=open]")
    assert titles.all_text_contents() == ["The second conversation", "The first conversation"]
    titles.nth(1).click()
    assert page.text(".bubble") == "The first conversation"
    page.page.once("dialog", lambda dialog: dialog.accept())
    page.page.hover("#conversations li:nth-child(2)")
    page.page.click("#conversations li:nth-child(2) [data-action=delete]")
    assert titles.all_text_contents() == ["The second conversation"] and page.page.is_visible("#welcome")
    page.reload()
    assert page.page.is_visible("#welcome"), "an address without a conversation begins one"
    assert titles.all_text_contents() == ["The second conversation"]


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(visit, mock_url):
    page = visit(mock_url)
    page.type("[slow]")
    page.until("document.querySelectorAll('.turn:last-child .token').length > 2")
    page.page.once("dialog", lambda dialog: dialog.accept())
    page.page.hover("#conversations li")
    page.page.click("#conversations [data-action=delete]")
    page.until_idle()
    assert page.page.is_visible("#welcome") and page.evaluate("Object.keys(localStorage).filter(key => key.includes('chat'))") == []
    page.ask("Another")
    assert page.page.locator("#conversations li").count() == 1


def test_a_conversation_is_exported(visit, mock_url):
    page = visit(mock_url)
    page.ask("[markdown]")
    with page.page.expect_download() as download:
        page.page.click("#export")
    assert Path(download.value.path()).read_text() == f"# [markdown]\n\n## You\n\n[markdown]\n\n## Answer\n\n{MARKDOWN}\n"


def test_sliders_say_nothing_until_they_are_moved(visit, mock_url):
    page = visit(mock_url)
    page.page.click("#settings-open")
    page.set("top-p", 0.5)
    page.page.press("#top-p", "Delete")
    assert page.text("output[for=temperature]") == page.text("output[for=top-p]") == "default"
    page.ask("Hello")
    assert not page.bodies[0].keys() & {"temperature", "top_p"}, "the model's own"
    page.reload()
    assert page.text("output[for=temperature]") == "default"


def test_settings_are_sent_as_they_are_and_remembered(visit, mock_url):
    page = visit(mock_url)
    page.page.click("#settings-open")
    page.page.select_option("#tree", "3/1/4")
    for field, value in {"system": "Be brief.", "seed": 7, "max-tokens": 32, "temperature": 0.8, "top-p": 0.5}.items():
        page.set(field, value)
    assert page.text("output[for=temperature]") == "0.8" and page.text("output[for=top-p]") == "0.5"
    page.ask("Hello")
    (body,) = page.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (32, 0.8, 0.5, 7)
    assert body["speculative"] == {"trace": True, "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    assert body["model"] == "mock-7b" and body["stream"] is True
    page.page.click("label:has(#coloured)")
    page.reload()
    assert page.page.input_value("#system") == "Be brief." and page.page.input_value("#temperature") == "0.8"
    assert page.text("output[for=temperature]") == "0.8"
    assert page.page.is_checked("#coloured") and page.evaluate("document.body.classList.contains('coloured')")


def test_a_server_that_is_gone_is_told_and_found_again(visit, mock_url):
    page = visit(mock_url)
    page.page.route("**/v1/models", lambda route: route.abort())
    page.page.reload()
    page.until("byId('model').textContent === 'no answer from the server'")
    page.page.unroute("**/v1/models")
    page.until("byId('model').textContent.startsWith('mock-7b')", seconds=10)
    page.expect_complaints("ERR_FAILED")


def test_the_key_is_sent_and_kept_for_the_tab_only(visit):
    with serving(create_mock(pace=0.002, api_key="secret")) as url:
        page = visit(url)
        assert page.text("#model") == "an API key is needed" and page.evaluate("document.activeElement.id") == "key"
        page.page.fill("#key", "secret")
        page.page.press("#key", "Enter")
        page.until("byId('model').textContent.includes('mock-7b')")
        page.ask("Hello")
        assert page.answer() != ""
        kept = "[sessionStorage.getItem('jaxspec-key'), JSON.stringify(localStorage).includes('secret'), document.cookie]"
        assert page.evaluate(kept) == ["secret", False, ""]
        page.page.reload()
        page.until("byId('model').textContent.includes('mock-7b')")
        page.expect_complaints("401")


@pytest.mark.parametrize("kept", [True, False])
def test_a_browser_that_keeps_nothing_loses_no_answer(visit, mock_url, kept):
    page = visit(mock_url)
    if not kept:
        page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full') } }")
    page.ask("Hello")
    assert page.answer() and page.page.is_hidden("#not-kept") == kept


def test_a_browser_that_lets_pages_keep_nothing_shows_the_page(visit, mock_url):
    page = visit(mock_url)
    refuse = "Object.defineProperty(window, '{}', {{ get() {{ throw new DOMException('no', 'SecurityError') }} }});"
    page.page.add_init_script(refuse.format("sessionStorage") + refuse.format("localStorage"))
    page.reload()
    page.ask("Hello")
    assert page.answer() and page.page.is_visible("#not-kept")


def test_a_model_without_a_chat_template_completes_text(visit):
    with serving(create_mock(pace=0.002, has_chat=False)) as url:
        page = visit(url)
        page.until("byId('chat-mode').disabled")
        assert "no chat template" in page.text("#welcome-note")
        page.page.click(".example >> nth=0")
        assert page.page.input_value("#message").startswith("Once upon a time")
        page.page.press("#message", "Enter")
        assert not page.bodies, "Enter breaks the line"
        page.ask("def f():")
        assert page.bodies[0]["prompt"] == "def f():" and page.bodies[0]["max_tokens"] == 160
        assert "".join(text for text, _ in page.tokens()) == page.answer() != ""
