"""The page for everyone: sizes, schemes, contrast, names, motion, and what axe-core finds; on a server without a model."""

import pytest

from tests.browser.conftest import SIZES

CLASSES = ("d1", "d2", "d3", "d4", "d5", "d6", "bonus", "plain", "by-head", "by-ngram", "by-both", "by-other")
AXE = """() => axe.run({ resultTypes: ['violations'] }).then(({ violations }) => violations
    .filter(({ impact }) => ['serious', 'critical'].includes(impact))
    .map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target).join(' ')}`))"""
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_core_finds_no_serious_problem(visit, mock_url, axe_core, size, scheme):
    width, height = SIZES[size]
    page = visit(mock_url, width=width, height=height, color_scheme=scheme, reduced_motion="reduce")
    page.page.evaluate(axe_core)
    page.until("byId('model').textContent.startsWith('mock-7b')")
    assert page.evaluate(AXE) == []
    page.ask("[markdown]")
    assert page.evaluate(AXE) == []
    page.page.click("label:has(#coloured)")
    page.ask("[merged] [breaks]")
    page.look_inside()
    page.page.click("#race")
    page.until_idle()
    assert page.evaluate(AXE) == []
    page.page.keyboard.press("Escape")
    page.page.click("#settings-open")
    assert page.evaluate(AXE) == []
    page.page.keyboard.press("Escape")
    if page.page.is_hidden("#sidebar"):
        page.page.click("#sidebar-open")
        assert page.evaluate(AXE) == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_can_be_read_on_every_colour(visit, mock_url, scheme):
    page = visit(mock_url, color_scheme=scheme)
    page.ask("Hello")
    page.page.click("label:has(#coloured)")
    style = """selector => {
        const style = getComputedStyle(document.querySelector(selector)); return [style.color, style.backgroundColor] }"""
    show = """names => document.querySelector('.answer .body').replaceChildren(
        ...names.map(name => make('i', { className: `token ${name}`, text: 'x' })))"""
    page.evaluate(show, CLASSES)
    depths = []
    for name in CLASSES:
        for marked in (False, True):
            page.evaluate(f"document.querySelector('.body .{name}').classList.toggle('marked', {str(marked).lower()})")
            contrast, light = page.page.evaluate(CONTRAST, page.page.evaluate(style, f".body .{name}"))
            assert contrast >= 4.5, (name, marked)
            if marked and name.startswith("d"):
                depths.append(light)
    assert depths == sorted(depths, reverse=scheme == "light"), "deeper is further from the paper"


def test_colours_are_off_until_they_are_switched_on(visit, mock_url):
    page = visit(mock_url)
    page.ask("Hello")
    background = "getComputedStyle(document.querySelector('.body .token')).backgroundColor"
    plain = page.evaluate(background)
    page.page.click("label:has(#coloured)")
    assert page.evaluate(background) != plain == "rgba(0, 0, 0, 0)"


@pytest.mark.parametrize("width", [320, 390, 900, 1280])
def test_nothing_is_wider_than_the_page_and_the_legend_does_not_overlap(visit, mock_url, width):
    page = visit(mock_url, width=width, height=800)
    page.ask("[markdown] [merged] " + "averylongword" * 30)
    assert not page.overflows()
    page.look_inside()
    assert not page.overflows()
    overlaps = """() => { const boxes = [...document.querySelectorAll('#legend li > .entry > *, .figures dt, .top > :not(.name)')]
            .map(element => element.getBoundingClientRect()).filter(box => box.width);
        return boxes.flatMap((a, index) => boxes.slice(index + 1).filter(b =>
            a.left < b.right - 0.5 && b.left < a.right - 0.5 && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5)).length }"""
    assert page.evaluate(overlaps) == 0
    cramped = "[...document.querySelectorAll('#legend li > .entry > *')].filter(part => part.scrollWidth > part.clientWidth)"
    assert page.evaluate(f"{cramped}.map(part => part.textContent)") == []


@pytest.mark.parametrize("size", SIZES)
def test_the_box_stays_where_it_is_while_an_answer_is_written(visit, mock_url, size):
    width, height = SIZES[size]
    page = visit(mock_url, width=width, height=height)
    before = page.page.locator("#message").bounding_box()
    page.type("[slow]")
    page.until("document.querySelectorAll('.turn:last-child .token').length > 5")
    assert page.page.locator("#message").bounding_box() == before
    page.page.keyboard.press("Escape")
    page.until_idle()
    assert page.page.locator("#message").bounding_box() == before
    assert page.evaluate("byId('scroll').scrollHeight - byId('scroll').scrollTop - byId('scroll').clientHeight") < 5


def test_the_reader_who_scrolls_up_is_left_there(visit, mock_url):
    page = visit(mock_url, height=500)
    page.ask("Hello")
    page.type("[slow]")
    page.until("document.querySelectorAll('.turn:last-child .token').length > 5")
    page.page.mouse.move(700, 200)
    page.page.mouse.wheel(0, -300)
    page.until("!byId('to-end').hidden")
    at = page.evaluate("byId('scroll').scrollTop")
    tokens = len(page.tokens())
    page.until(f"document.querySelectorAll('.turn:last-child .token').length > {tokens + 10}")
    assert page.evaluate("byId('scroll').scrollTop") == at
    page.page.click("#to-end")
    page.until("byId('to-end').hidden")
    page.page.keyboard.press("Escape")
    page.until_idle()


def test_every_field_has_a_name(visit, mock_url):
    page = visit(mock_url)
    page.ask("[markdown]")
    unnamed = """[...document.querySelectorAll('input, select, textarea, button, canvas, [role=group]')]
        .filter(field => !field.labels?.length && !field.ariaLabel && !field.getAttribute('aria-labelledby'))
        .filter(field => !field.textContent.trim()).map(field => field.id)"""
    assert page.page.evaluate(unnamed) == []
    assert page.page.locator(".body[aria-live]").count() == 0, "a screen reader would read every token"
    assert page.text("#spoken") == "The answer is complete."


def test_what_is_covered_can_not_be_reached(visit, mock_url):
    """On a phone the panel lies over the conversation; Escape closes it."""
    page = visit(mock_url, width=390, height=844)
    page.look_inside()
    assert page.evaluate("byId('chat').inert")
    page.page.keyboard.press("Escape")
    assert not page.evaluate("byId('chat').inert") and page.page.is_hidden("#panel")


def test_nothing_moves_for_those_who_want_that(visit, mock_url):
    page = visit(mock_url, reduced_motion="reduce")
    for calm, moves in (("reduce", False), ("no-preference", True)):
        page.page.emulate_media(reduced_motion=calm)
        page.ask("Hello")
        page.look_inside()
        page.evaluate("selectCycle(3, false)")
        assert (page.evaluate("document.getAnimations().length") > 0) == moves
