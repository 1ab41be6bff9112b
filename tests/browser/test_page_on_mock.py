"""The page in a browser, on a server without a model: what the built-in model never does."""

import pytest

from tests.browser.conftest import serving
from tests.browser.mock_server import CODE, HOSTILE, UNICODE, create_mock

CLASSES = ("d1", "d2", "d3", "d4", "d5", "d6", "bonus", "plain")


def test_hostile_text_stays_text(visit, mock_url):
    page = visit(mock_url)
    page.page.fill("#max-tokens", "500")
    page.run("[hostile] <img src=x onerror=window.hacked=3>")
    assert page.answer() == HOSTILE * 3
    assert page.page.locator("main :is(img, script, b, iframe)").count() == 0
    assert page.page.evaluate("window.hacked") is None
    assert "<b>" in page.page.evaluate("state.runs[0].cycles.flatMap(cycle => cycle.tree?.tokens ?? [])")
    for cycle in range(int(page.page.evaluate("state.runs[0].cycles.length"))):
        page.page.evaluate(f"selectCycle({cycle})")
    assert page.page.locator("main :is(img, script, b, iframe)").count() == 0


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
        page.page.evaluate(f"(() => {{ try {{ {script} }} catch {{}} }})()")
        page.until("true")
        assert len(page.complaints) > before, script
    assert page.page.evaluate("window.hacked") is None
    assert failures == [("http://127.0.0.1:9/", "csp")]
    page.complaints.clear()
    page.foreign.clear()


def test_characters_of_several_tokens_come_out_whole(visit, mock_url):
    page = visit(mock_url)
    page.page.fill("#max-tokens", "400")
    page.run("[unicode]")
    assert page.answer() == UNICODE * 3
    silent = page.page.locator(".token.silent")
    assert silent.count() > 20 and all(text == "" for text in silent.all_text_contents())
    assert page.page.evaluate(
        "[...document.querySelectorAll('.token.silent')].every(token => token.getBoundingClientRect().width > 2)"
    )


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
    page.run(word)
    assert page.text("#failure-0") == message and page.text("#status-0") == "failed"
    assert (page.page.get_attribute("#temperature", "aria-invalid") == "true") == (word == "[400]")
    assert (len(page.tokens()) > 5) == (word in ("[breaks]", "[ends early]")), "what came before is kept"
    assert all("status of" in complaint for complaint in page.complaints)
    page.complaints.clear()
    page.run("fine again")
    assert page.page.is_hidden("#failure-0")


def test_a_server_that_is_gone_is_told(visit, mock_url):
    page = visit(mock_url)
    page.page.route("**/v1/*", lambda route: route.abort())
    page.run("def f():")
    assert page.text("#failure-0") == "Can't connect to the server."
    page.page.evaluate("meet()")
    page.until("byId('model').textContent === 'no answer from the server'", seconds=5)
    assert all("ERR_FAILED" in complaint for complaint in page.complaints)
    page.complaints.clear()


def test_a_race_with_a_failure_has_no_verdict(visit, mock_url):
    page = visit(mock_url)
    page.run("[breaks]", button="#race")
    assert page.text("#verdict-same") == page.text("#verdict-ratio") == "\N{EN DASH}"
    assert page.page.is_visible("#failure-0") and page.page.is_visible("#failure-1")


def test_a_race_whose_texts_differ_says_so_and_where(visit, mock_url):
    page = visit(mock_url)
    page.run("[differs]", button="#race")
    assert page.text("#verdict-same") == "✗ they differ"
    right = "".join(page.page.locator("#output-1 .token:not(.differs)").all_text_contents())
    assert right == CODE[: CODE.index("OverflowError")]


def test_sides_of_a_race_get_the_same_seed_and_prompt(visit, mock_url):
    page = visit(mock_url)
    bodies = []
    page.page.on("request", lambda request: request.post_data and bodies.append(request.post_data_json))
    page.run("def f():", button="#race")
    on, off = bodies
    assert on["speculative"] == {"trace": True} and off["speculative"] == {"trace": True, "enabled": False}
    assert isinstance(on["seed"], int) and on | {"speculative": None} == off | {"speculative": None}


def test_fields_are_sent_as_they_are(visit, mock_url):
    page = visit(mock_url)
    bodies = []
    page.page.on("request", lambda request: request.post_data and bodies.append(request.post_data_json))
    page.page.select_option("#tree", "3/1/4")
    page.page.fill("#seed", "7")
    page.page.fill("#max-tokens", "")
    for slider, value in (("temperature", "0.8"), ("top-p", "0.5")):
        page.slide(slider, float(value))
        assert page.text(f"output[for={slider}]") == value
    page.run("def f():")
    (body,) = bodies
    assert (body["prompt"], body["temperature"], body["top_p"], body["seed"]) == ("def f():", 0.8, 0.5, 7)
    assert body["speculative"] == {"trace": True, "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    assert body["model"] == "mock-7b" and body["stream"] is True and "max_tokens" not in body


def test_trees_are_those_of_the_server(visit, mock_url):
    page = visit(mock_url)
    page.until("byId('tree').options.length > 1")
    assert page.page.locator("#tree option").all_text_contents() == ["5/4/8 default", "3/1/4", "5/8/64"]


def test_a_large_tree_scrolls_to_its_accepted_path(visit, mock_url):
    page = visit(mock_url)
    page.until("byId('tree').options.length > 1")
    page.page.select_option("#tree", "5/8/64")
    page.run("def f():")
    longest = page.page.evaluate(
        "state.runs[0].cycles.findIndex(cycle => cycle.tree?.tokens.length > 40 && cycle.tokens.length > 1)"
    )
    page.page.evaluate(f"selectCycle({longest})")
    assert page.page.locator(".node").count() > 40
    inside = """(() => { const view = byId('tree-view').getBoundingClientRect();
        const node = [...document.querySelectorAll('.node.accepted')].at(-1).getBoundingClientRect();
        return node.top >= view.top && node.bottom <= view.bottom })()"""
    assert page.page.evaluate(inside) and not page.overflows()


def test_old_trees_of_a_long_answer_are_dropped(visit, mock_url):
    page = visit(mock_url)
    page.run("def f():")
    page.page.evaluate(
        """(() => { const event = { choices: [], speculative_trace: {
            tokens: [{ text: 'x', from: 'bonus' }], tree: { tokens: ['y', 'z'], parents: [-1, 0], accepted: [0] } } };
        for (let count = 0; count <= KEPT_TREES; count += 1) addEvent(state.runs[0], event, performance.now()); })()"""
    )
    kept = page.page.evaluate("state.runs[0].cycles.map(cycle => cycle.tree !== null)")
    assert sum(kept) == 2000 and not any(kept[:-2000])
    page.page.evaluate("selectCycle(5)")
    assert page.text("#tree-view") == "This tree is no longer kept."


def test_the_text_of_a_long_answer_stays_whole_and_its_elements_few(visit, mock_url):
    page = visit(mock_url)
    page.run("def f():")
    page.page.evaluate(
        """(() => { for (let count = 0; count < 3000; count += 1) {
            const trace = { tokens: [{ text: `${count}\\n`, from: 'plain' }], tree: null };
            addEvent(state.runs[0], { choices: [], speculative_trace: trace }, performance.now());
            if (count % 100 === 0) drawAll();
        } drawAll(); })()"""
    )
    assert page.answer() == page.page.evaluate("state.runs[0].text") and page.answer().endswith("2999\n")
    assert 2000 <= page.page.locator("#output-0 .token").count() <= 2500
    page.page.evaluate("selectCycle(5)")
    assert page.page.locator("#output-0 .marked").count() == 0
    page.page.evaluate("selectCycle(state.runs[0].cycles.length - 9)")
    assert page.text("#output-0 .marked") == "2991\n"


def test_the_key_is_sent_and_kept_for_the_tab_only(visit):
    with serving(create_mock(pace=0.002, api_key="secret")) as url:
        page = visit(url)
        assert page.text("#model") == "an API key is needed"
        page.page.fill("#key", "secret")
        page.page.press("#key", "Enter")
        page.until("byId('model').textContent.includes('mock-7b')")
        page.run("def f():")
        assert page.answer() != ""
        assert page.page.evaluate("[sessionStorage.getItem('jaxspec-key'), localStorage.length, document.cookie]") == [
            "secret",
            0,
            "",
        ]
        assert page.page.get_attribute("#key", "type") == "password"
        page.page.reload()
        page.until("byId('model').textContent.includes('mock-7b')")
        assert all("401" in complaint for complaint in page.complaints)
        page.complaints.clear()


def test_a_chat_goes_on(visit, mock_url):
    page = visit(mock_url)
    bodies = []
    page.page.on("request", lambda request: request.post_data and bodies.append(request.post_data_json))
    page.page.click("text=Chat")
    page.run("Hello")
    first = page.answer()
    assert first and (CODE * 4).startswith(first)
    page.run("And [unicode]?")
    roles = [(message["role"], message["content"]) for message in bodies[1]["messages"]]
    assert roles == [("user", "Hello"), ("assistant", first), ("user", "And [unicode]?")]
    assert page.page.locator(".said").all_text_contents() == ["Hello", "And [unicode]?"]
    page.run("[503]")
    page.complaints.clear()
    assert page.page.locator(".said").count() == 2, "what was not answered is no part of the chat"
    page.page.click("#forget")
    page.run("Hello again")
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Hello again"}]
    assert page.page.locator(".said").count() == 1


@pytest.mark.parametrize("tells_chat", [True, False])
def test_chat_is_off_without_a_chat_template(visit, tells_chat):
    with serving(create_mock(pace=0.002, has_chat=False, tells_chat=tells_chat)) as url:
        page = visit(url)
        if not tells_chat:  # the refusal does
            page.page.click("text=Chat")
            page.run("Hello")
            assert page.text("#failure-0") == "messages: this model has no chat template; use /v1/completions"
            assert all("400" in complaint for complaint in page.complaints)
            page.complaints.clear()
        page.until("byId('chat-mode').disabled")
        assert "no chat template" in page.text("#mode-note") and page.page.is_checked("input[value=text]")
        page.run("def f():")
        assert page.answer() != ""


def test_keys_run_stop_and_walk_through_tokens(visit, mock_url):
    page = visit(mock_url)
    page.page.focus("#prompt")
    page.page.keyboard.press("Control+Enter")
    page.until("state.runs[0]?.tokens > 0")
    page.until_idle()
    page.page.focus("#output-0")
    for _ in range(3):
        page.page.keyboard.press("ArrowRight")
    assert page.page.evaluate("document.activeElement === outputs[0].spans.flat()[2]")
    assert page.text("#token-detail") != ""
    assert page.page.evaluate("state.shown.cycle.index") == page.page.evaluate("Number(document.activeElement.dataset.cycle)")
    page.page.focus("#strip")
    page.page.keyboard.press("Home")
    page.page.keyboard.press("ArrowRight")
    assert page.page.get_attribute("#strip", "aria-valuenow") == "2"
    assert page.text("#tree-caption").startswith("Pass 2 of ")
    page.page.fill("#prompt", "[slow]")
    page.page.keyboard.press("Control+Enter")
    page.until("state.runs[0].tokens > 3")
    page.page.keyboard.press("Escape")
    page.until_idle()
    assert page.text("#status-0") == "stopped"


def test_the_strip_selects_the_pass_under_the_pointer(visit, mock_url):
    page = visit(mock_url)
    page.run("def f():")
    box = page.page.locator("#strip").bounding_box()
    page.page.mouse.move(box["x"] + 22 + 9 * 4 + 3, box["y"] + 60)
    expected = page.page.evaluate("state.stripFrom") + 5
    assert page.text("#tree-caption").startswith(f"Pass {expected} of ")


def test_a_replay_goes_through_the_passes_and_can_be_stopped(visit, mock_url):
    page = visit(mock_url)
    page.run("def f():")
    page.page.click("#replay")
    assert page.text("#tree-caption").startswith("Pass 1 of ")
    page.until("byId('tree-caption').textContent.startsWith('Pass 2 of ')", seconds=5)
    page.page.click("#replay")
    assert page.page.evaluate("state.replay") is None and page.text("#replay") == "Replay slowly"


BOXES = """['composer', 'lanes', 'legend', 'tree-view', 'strip', 'run'].map(id => {
    const box = byId(id).getBoundingClientRect(); return [box.x, box.y, box.width, box.height] })"""


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_jumps(visit, mock_url, width):
    page = visit(mock_url, width=width, height=900, reduced_motion="reduce")
    before = page.page.evaluate(BOXES)
    page.page.fill("#prompt", "[slow]")
    page.page.click("#run")
    page.until("state.runs[0].tokens > 5")
    scrolled = page.page.evaluate("scrollY")
    boxes = [[x, round(y + scrolled, 1), w, h] for x, y, w, h in page.page.evaluate(BOXES)]
    assert boxes == [[x, round(y, 1), w, h] for x, y, w, h in before]
    page.page.keyboard.press("Escape")
    page.until_idle()
    page.page.evaluate("scrollTo(0, 0)")
    page.run("def f():")
    page.page.evaluate("scrollTo(0, 0)")
    assert page.page.evaluate(BOXES) == before


CONTRAST = """([foreground, background]) => {
    const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const light = (colour) => {
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((value) => {
            const part = value / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [a, b] = [light(foreground), light(background)].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), light(background)];
}"""


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_can_be_read_on_every_colour(visit, mock_url, scheme):
    page = visit(mock_url, color_scheme=scheme)
    style = """selector => {
        const style = getComputedStyle(document.querySelector(selector)); return [style.color, style.backgroundColor] }"""
    show = "names => byId('output-0').replaceChildren(...names.map(name => make('i', { className: `token ${name}`, text: 'x' })))"
    page.page.evaluate(show, CLASSES)
    depths = []
    for name in CLASSES:
        for marked in (False, True):
            page.page.evaluate(f"document.querySelector('#output-0 .{name}').classList.toggle('marked', {str(marked).lower()})")
            contrast, light = page.page.evaluate(CONTRAST, page.page.evaluate(style, f"#output-0 .{name}"))
            assert contrast >= 4.5, (name, marked)
            if marked and name.startswith("d"):
                depths.append(light)
    assert depths == sorted(depths, reverse=scheme == "light"), "deeper is further from the paper"
    for selector in ("#run", "#model", ".pitch", "#order-note", "#prompt", "h2", ".figures dt"):
        colour = page.page.evaluate(style, selector)[0]
        panel = page.page.evaluate("getComputedStyle(byId('lane-0')).backgroundColor")
        back = page.page.evaluate(style, selector)[1] if selector in ("#run", "#prompt") else panel
        assert page.page.evaluate(CONTRAST, [colour, back])[0] >= 4.5, selector


def test_every_field_has_a_name(visit, mock_url):
    page = visit(mock_url)
    unnamed = """[...document.querySelectorAll('input, select, textarea, button, canvas, [role=group]')]
        .filter(field => !field.labels?.length && !field.ariaLabel && !field.getAttribute('aria-labelledby'))
        .filter(field => !field.textContent.trim()).map(field => field.id)"""
    assert page.page.evaluate(unnamed) == []
    assert page.page.get_attribute("#output-0", "aria-live") is None, "a screen reader would read every token"


def test_nothing_moves_for_those_who_want_that(visit, mock_url):
    page = visit(mock_url, reduced_motion="reduce")
    page.run("def f():")
    moving = "document.getAnimations().length"
    page.page.evaluate("selectCycle(3, false)")
    assert page.page.evaluate(moving) == 0
    lively = visit(mock_url)
    lively.run("def f():")
    lively.page.evaluate("selectCycle(3, false)")
    assert lively.page.evaluate(moving) > 0


def test_a_server_that_says_little_is_enough(visit):
    """No information but the model list, and no trace: the text comes as plain tokens."""
    with serving(create_mock(pace=0.002, tells=False)) as url:
        page = visit(url)
        page.run("[no trace]")
        assert page.answer() and (CODE * 4).startswith(page.answer())
        assert {origin for _, origin in page.tokens()} == {"plain"}
        assert all("404" in complaint for complaint in page.complaints)
        page.complaints.clear()
