"""What opens beside a conversation: the tree, tokens per pass, a race; on a server without a model."""

import json

from tests.browser.conftest import serving
from tests.browser.mock_server import CODE, create_mock


def test_the_panel_is_one_click_away_and_never_in_the_way(visit, mock_url):
    page = visit(mock_url)
    assert page.page.is_hidden("#panel")
    page.page.click("#inside-open")
    assert page.text("#tree-caption") == "an example" and page.page.is_visible("#tree-view svg")
    page.page.click("#inside-open")
    assert page.page.is_hidden("#panel")
    page.ask("Hello")
    page.page.click(".figure")
    assert page.number("#figure-accept") == round(page.number("#figure-accept"), 2) > 1
    assert page.text(".figure") == f"{page.number('#figure-accept'):.1f} tokens per pass"
    assert "instead of" in page.text(".explained")
    assert page.page.is_visible(".turn:last-child .body"), "the answer stays in sight"


def test_an_older_answer_is_looked_into(visit, mock_url):
    page = visit(mock_url)
    page.ask("First")
    page.set("max-tokens", 20)
    page.ask("Second")
    page.look_inside()
    assert page.number("#figure-tokens") == 20
    page.page.click(".turn:nth-child(2) .figure")
    assert page.number("#figure-tokens") > 20
    page.page.hover(".turn:last-child .token >> nth=3")
    assert page.number("#figure-tokens") == 20, "pointing at a token turns to its answer"
    page.page.click("#new")
    assert page.text("#tree-caption") == "an example"
    page.page.click("#conversations [data-action=open]")
    assert page.number("#figure-tokens") == 20 and page.page.is_visible("#tree-view"), "trees stay as long as the page"
    page.reload()
    page.page.click(".turn:nth-child(2) .figure")
    assert page.number("#figure-tokens") > 20 and page.page.is_hidden("#tree-view")
    assert "regenerate it" in page.text("#gone")
    page.page.click("text=Regenerate")
    page.until_idle()
    assert page.page.is_visible("#tree-view") and page.page.is_hidden("#gone")


def test_trees_are_those_of_the_server(visit, mock_url):
    page = visit(mock_url)
    page.until("byId('tree').options.length > 1")
    assert page.page.locator("#tree option").all_text_contents() == ["5/4/8 default", "3/1/4", "5/8/64", "7/4/8/3"]


def test_a_large_tree_scrolls_to_its_accepted_path(visit, mock_url):
    page = visit(mock_url)
    page.until("byId('tree').options.length > 1")
    page.page.click("#settings-open")
    page.page.select_option("#tree", "5/8/64")
    page.ask("Hello")
    page.look_inside()
    longest = page.evaluate(
        "state.inspected.run.cycles.findIndex(cycle => cycle.tree?.tokens.length > 40 && cycle.tokens.length > 1)"
    )
    page.evaluate(f"selectCycle({longest})")
    assert page.page.locator(".node").count() > 40
    inside = """() => { const view = byId('tree-view').getBoundingClientRect();
        const node = [...document.querySelectorAll('.node.accepted')].at(-1).getBoundingClientRect();
        return node.top >= view.top && node.bottom <= view.bottom }"""
    assert page.evaluate(inside) and not page.overflows()


def test_each_source_of_merged_drafts_has_its_colour_its_mark_and_its_line(visit, mock_url):
    page = visit(mock_url)
    page.page.click("label:has(#coloured)")
    page.ask("Hello")
    page.look_inside()
    legend = "[...document.querySelectorAll('#legend li:not([hidden])')].map(item => item.dataset.origin)"
    by_depth = [*(f"d{depth}" for depth in range(1, 7)), "bonus", "plain"]
    assert page.evaluate(legend) == by_depth and page.page.locator(".node .mark").count() == 0
    page.ask("[merged]")
    sources = ["by-head", "by-ngram", "by-both", "by-other"]
    assert page.evaluate(legend) == [*sources, "bonus", "plain"]
    traced = page.evaluate(
        """state.inspected.run.cycles.flatMap(({ tokens, tree }) => tokens.map(token =>
            token.from === 'draft' ? tree.sources[tree.accepted[token.depth] - 1] : token.from))"""
    )
    names = dict(zip(["head", "ngram", "head+ngram", "other"], sources, strict=True)) | {"prefill": "plain", "bonus": "bonus"}
    shown = [origin for _, origin in page.tokens()]
    assert shown == [names[origin] for origin in traced] and set(shown) >= set(sources)
    looks = """(names) => names.map(name => { const line = getComputedStyle(document.querySelector(`.body .token.${name}`));
        return [line.backgroundColor, line.borderBottomStyle] })"""
    colours, lines = zip(*page.evaluate(looks, sources), strict=True)
    assert len(set(colours)) == len(set(lines)) == 4
    page.evaluate("selectCycle(state.inspected.run.cycles.findIndex(cycle => cycle.tree?.sources && cycle.tokens.length > 2))")
    mark = """[...document.querySelectorAll('.node')].flatMap(node => node.querySelector('.mark') ?
        [[[...node.classList].at(-1), node.querySelector('.mark').getAttribute('d').replaceAll(/M[^a-zA-Z]*/g, '')]] : [])"""
    marks = page.evaluate(mark)
    assert len(marks) == page.page.locator(".node:not(.root, .bonus)").count() and len({shape for _, shape in marks}) == 4
    assert {source for source, _ in marks} == set(sources)
    assert page.page.locator(".node.by-ngram title").first.text_content().endswith(", from the n-grams")
    page.reload()
    assert [origin for _, origin in page.tokens()] == shown, "kept with the conversation"
    page.page.click(".turn:last-child .figure")
    assert page.evaluate(legend) == [*sources, "bonus", "plain"]


def test_old_trees_of_a_long_answer_are_dropped(visit, mock_url):
    page = visit(mock_url)
    page.ask("Hello")
    page.look_inside()
    page.evaluate(
        """() => { const event = { choices: [], speculative_trace: {
            tokens: [{ text: 'x', from: 'bonus' }], tree: { tokens: ['y', 'z'], parents: [-1, 0], accepted: [0] } } };
        for (let count = 0; count <= 2000; count += 1) addEvent(state.inspected.run, event, performance.now()); }"""
    )
    kept = page.evaluate("state.inspected.run.cycles.map(cycle => cycle.tree !== null)")
    assert sum(kept) == 2000 and not any(kept[:-2000])
    page.evaluate("selectCycle(5)")
    assert page.text("#tree-view") == "This tree is no longer kept."


def test_a_long_answer_changes_only_at_its_end(visit, mock_url):
    """Blocks that are complete are not drawn again."""
    page = visit(mock_url)
    page.ask("Hello")
    script = """() => { const { view, run } = state.inspected; const before = [...view.box.children];
        const add = (text) => addEvent(run, { choices: [], speculative_trace: { tokens: [{ text, from: 'x' }], tree: null } }, 0);
        for (let count = 0; count < 500; count += 1) add(`\\n\\nparagraph ${count}`);
        view.show({ text: run.text, pieces: run.pieces, offset: 0, run });
        const middle = [...view.box.children];
        add(' and the end');
        view.show({ text: run.text, pieces: run.pieces, offset: 0, run });
        const after = [...view.box.children];
        return [before.length, middle.length, after.length, after.filter((node, index) => node !== middle[index]).length,
            view.box.textContent.endsWith('paragraph 499 and the end')] }"""
    before, middle, after, redrawn, is_whole = page.evaluate(script)
    assert middle == after == before + 500 and redrawn == 1 and is_whole


def test_the_strip_selects_the_pass_under_the_pointer(visit, mock_url):
    page = visit(mock_url)
    page.ask("Hello")
    page.look_inside()
    page.page.locator("#strip").scroll_into_view_if_needed()
    box = page.page.locator("#strip").bounding_box()
    page.page.mouse.move(box["x"] + 22 + 9 * 4 + 3, box["y"] + 60)
    expected = page.evaluate("state.stripFrom") + 5
    assert page.text("#tree-caption").startswith(f"Pass {expected} of ")


def test_a_replay_goes_through_the_passes_and_can_be_stopped(visit, mock_url):
    page = visit(mock_url)
    page.ask("Hello")
    page.look_inside()
    page.page.click("#replay")
    assert page.text("#tree-caption").startswith("Pass 1 of ")
    page.until("byId('tree-caption').textContent.startsWith('Pass 2 of ')", seconds=5)
    page.page.click("#replay")
    assert page.evaluate("state.replay") is None and page.text("#replay") == "Replay slowly"


def race(page, question):
    """Asks, and races the question afterwards."""
    page.ask(question)
    page.look_inside()
    page.page.click("#race")
    page.until_idle()


def test_sides_of_a_race_get_the_same_seed_and_prompt_and_the_conversation_stays(visit, mock_url):
    page = visit(mock_url)
    race(page, "Hello")
    answer, on, off = page.bodies
    assert on["speculative"] == {"trace": True} and off["speculative"] == {"trace": True, "enabled": False}
    assert isinstance(on["seed"], int) and on | {"speculative": None} == off | {"speculative": None}
    assert on["messages"] == answer["messages"] and page.page.locator(".turn").count() == 2
    assert page.text("#verdict-same") == "✓ identical text"


def test_a_race_with_a_failure_has_no_verdict(visit):
    with serving(create_mock(pace=0.002)) as url:
        page = visit(url)
        race(page, "[breaks]")
        assert page.text("#verdict-same") == page.text("#verdict-ratio") == "\N{EN DASH}"
        assert page.page.is_visible("#failure-0") and page.page.is_visible("#failure-1")


def test_a_race_whose_texts_differ_says_so_and_where(visit, mock_url):
    page = visit(mock_url)
    race(page, "[differs]")
    assert page.text("#verdict-same") == "✗ they differ"
    right = "".join(page.page.locator("#output-1 .token:not(.differs)").all_text_contents())
    assert right == CODE[: CODE.index("OverflowError")]


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


def test_a_schema_goes_with_requests_and_the_panel_tells_what_it_cut(visit, mock_url):
    page = visit(mock_url)
    page.ask("Without")
    page.look_inside()
    assert "response_format" not in page.bodies[0] and page.text("#tree-cut") == ""
    page.set("schema", json.dumps(SCHEMA))
    expected = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    page.ask("In a chat")
    assert page.text("#tree-cut") == "2 drafts cut by the schema: ·the ↵; 1 forced"
    assert page.page.locator("#tree-cut s").count() == 2
    page.page.click("#settings-open")
    page.page.click("label:has([value=text])")
    page.ask("A text")
    assert [body["response_format"] for body in page.bodies[1:]] == [expected] * 2 and "prompt" in page.bodies[2]


def test_a_schema_that_is_none_is_told_beside_the_field_and_not_sent(visit, mock_url):
    page = visit(mock_url)
    page.ask("Before")
    for wrong, said in (('{"type": ', "This is not JSON: "), ("[1]", "A schema is a JSON object")):
        page.set("schema", wrong)
        page.ask("Hello")
        page.page.click("text=Regenerate")
        assert page.page.is_visible("#schema-fault") and page.text("#schema-fault").startswith(said)
        assert page.evaluate("document.activeElement.id") == "schema"
        assert page.page.input_value("#message") == "Hello", "what was written stays"
    assert len(page.bodies) == 1
    page.set("schema", '{"not": {}}')
    assert page.text("#schema-fault") == "" and page.page.get_attribute("#schema", "aria-invalid") is None
    page.ask("Hello")
    assert "can't be compiled" in page.text(".turn:last-child .failure p")
    assert page.page.get_attribute("#schema", "aria-invalid") == "true"
    page.expect_complaints("400")
