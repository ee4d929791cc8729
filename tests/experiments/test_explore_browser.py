"""The page in a browser: its numbers, steps, keys, widths, themes, and that it asks for nothing."""

import json
import shutil
import threading

import pytest
from test_explore import PAGE, drawn_states, panels
from test_explore_script import WRITABLE, differences, drawn_inputs

pytestmark = pytest.mark.browser
api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]' brings it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no Chromium on the path: apt-get install chromium", allow_module_level=True)

# What the page shows of a panel: [key, text, all digits] of every number.
SHOWN = """name => [...document.querySelectorAll(`#${name} [data-key]`)].map(
    e => [e.dataset.key, e.textContent, e.title])"""
# The answers of the page's script, as text.
ANSWERED = f"""cases => {{
    {WRITABLE}
    return JSON.stringify(cases.map(([name, state]) => ANSWERS[name](state, DATA)), writable);
}}"""
# The milliseconds of a change of an input or a step, to the next frame.
TIMED = """async ([selector, value]) => {
    const input = document.querySelector(selector), before = performance.now();
    input.value = value;
    input.dispatchEvent(new Event(input.tagName === "SELECT" ? "change" : "input"));
    await Promise.resolve();
    document.body.offsetHeight;
    return performance.now() - before;
}"""
# Texts whose contrast with what is behind them is below 4.5, as WCAG has it.
FAINT = """() => {
    const parts = words => words.match(/[\\d.]+/g).map(Number);
    const light = rgb => rgb.slice(0, 3).map(c => c / 255).map(
        c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    ).reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
    const behind = e => {
        const found = parts(getComputedStyle(e).backgroundColor);
        return found.length < 4 || found[3] ? found : behind(e.parentElement);
    };
    const faint = e => {
        const ink = getComputedStyle(e)[e.closest("svg") ? "fill" : "color"];
        const [a, b] = [light(parts(ink)), light(behind(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05) < 4.5;
    };
    const unseen = "script, noscript, title";
    return [...document.querySelectorAll("body *")].filter(e => !e.closest(unseen)
        && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && faint(e)
    ).map(e => e.outerHTML.slice(0, 99));
}"""
NAMES = ["orders", "softmax", "traffic", "plan"]


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Opens an address; in the end nothing was said on the console and no other was asked for."""
    contexts, wrong = [], []

    def opened(url="", **options):
        live, url = url.startswith("http"), url or PAGE.as_uri()
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: refusal(live, m.text) or wrong.append(m.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        own = url.partition("#")[0]
        page.on("request", lambda r: r.url.startswith(own) or wrong.append(r.url))
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def refusal(live, text):
    """Chromium notes an answer of 400, which is how the server refuses."""
    return live and text.endswith("status of 400 (Bad Request)")


def go_to(page, name, state):
    """Show a state by its address, as a link does."""
    parts = "&".join(f"{name}.{axis}={value}" for axis, value in state.items())
    page.evaluate("""async hash => {
        location.hash = hash;
        await new Promise(done => setTimeout(done, 30));
    }""", parts)  # fmt: skip


@pytest.mark.parametrize(("name", "count"), [("orders", 1000), ("softmax", 200), ("traffic", 3000)])
def test_the_script_answers_what_python_answers(name, count, open_page):
    panel, page = panels()[name], open_page()
    states = drawn_inputs(panel, count, seed=1)
    found = json.loads(page.evaluate(ANSWERED, [[name, state] for state in states]))
    wrong = differences(panel, states, found)
    assert not wrong, (len(wrong), wrong[:2])


def shown_as(text, digits, value):
    """Whether a text, and all digits where the text has three, are the page's form of a value."""
    if value is None or isinstance(value, str):
        return text == ("–" if value is None else value)
    if isinstance(value, list):
        texts = text.split(" ") if value else []
        return len(texts) == len(value) and all(map(same_to_four, texts, value))
    number, _, unit = text.replace(",", "").partition(" ")
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}[
        unit.rstrip("%B")
    ]
    said = float(number) * scale
    if digits and float(digits.replace(",", "")) != pytest.approx(value, abs=1e-6):
        return False
    return said == pytest.approx(value, rel=0.006, abs=0.5 if unit == "%" else 0)


def same_to_four(text, value):
    return text.lower() == value if isinstance(value, str) else float(text) == float(f"{value:.4g}")


def expected(answer, key):
    """What the page has to show under a key of a panel's table or view."""
    if key.endswith(".now"):
        return answer[key.replace(".now", ".bytes")][0]
    head, _, rest = key.partition(".steps.")
    if rest:
        number, field = rest.split(".")
        value = answer[f"{head}.steps"][int(number)][field]
        return value if field == "moved" or isinstance(value, list) else [value]
    return answer[key]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_pythons(name, open_page):
    page, panel, numbers = open_page(), panels()[name], 0
    states = drawn_states(panel, 30) if name == "plan" else drawn_inputs(panel, 15)
    for state in states:
        go_to(page, name, state)
        answer = panel.at(**state)
        if "refused" in answer:
            assert page.inner_text(f"#{name} .refused") == answer["refused"]
            continue
        found = page.evaluate(SHOWN, name)
        for key, text, digits in found:
            assert shown_as(text, digits, expected(answer, key)), (state, key, text, digits)
        numbers += len(found)
        shown = {key for key, *_ in found}
        for prefix, _ in panel.columns:
            refused = f"{prefix}.refused"
            wanted = {refused} if refused in answer else {f"{prefix}.{k}" for k, *_ in panel.rows}
            assert wanted <= shown
    assert numbers > 100


@pytest.mark.parametrize("name", ["orders", "traffic"])
def test_every_slider_and_every_number_works(name, open_page):
    page = open_page()
    for axis, of in panels()[name].axes.items():
        if of.least is None or axis == "M":
            continue
        slider = page.locator(f"#{name} label:has(#{name}-{axis}) input[type=range]")
        for end in ("Home", "End", "ArrowLeft"):
            slider.press(end)
            assert page.locator(f"#{name} .refused:not(:empty)").count() == 0
        for value in (of.least, of.most):
            enter(page, f"#{name}-{axis}", str(value))
            assert page.locator(f"#{name} .refused:not(:empty)").count() == 0
            assert f"{name}.{axis}={value}" in page.url
        enter(page, f"#{name}-{axis}", str(of.values[0] or of.least))
    enter(page, f"#{name}-N", "0")
    assert page.inner_text(f"#{name} .refused").startswith("N must be an integer from 1 to ")
    assert page.evaluate(SHOWN, name)  # what was shown before stays


def test_the_dominant_arrays_are_named(open_page):
    page = open_page()
    go_to(page, "traffic", {"N": 4096, "Br": 128, "Bc": 64})
    said = page.inner_text("#traffic .view")
    assert "Most bytes: O, 77 %. O is moved in each pass over the rows (Tc = 64 passes)." in said
    assert "Most bytes: K and V, 97 %. K and V are loaded for each row tile (Tr = 32)." in said
    page.select_option("#traffic-tiles", "rule")
    assert page.is_hidden("#traffic-Br") and page.is_visible("#traffic-M")


def test_a_step_looks_the_same_however_one_comes_to_it(open_page):
    look = """() => [...document.querySelectorAll('#orders rect')].map(
        tile => [...tile.classList].sort().join(' '))"""
    inputs = {"N": 130, "Br": 32, "Bc": 48, "causal": "yes", "window": 20}
    page = open_page()
    go_to(page, "orders", inputs)
    for step in (40, 7, 23, 60, 22):
        page.evaluate(TIMED, ["#orders .transport input", str(step)])
        other = open_page()
        go_to(other, "orders", inputs | {"step": step})
        assert page.evaluate(look) == other.evaluate(look)


def test_the_calculator_opens_with_the_tiles_of_a_plan(open_page):
    page = open_page()
    go_to(page, "plan", {"gpu": "A100", "N": 2048, "dtype": "float32"})
    tiles = page.inner_text("[data-key='fa2.tiles']")
    page.click("#plan button:has-text('tiles of FA-2')")
    shown = [page.input_value(f"#traffic-{axis}") for axis in ("N", "Br", "Bc", "dtype")]
    assert shown == ["2048", *tiles.split(" x "), "float32"]
    assert top(page, "traffic") < 2


@pytest.mark.parametrize(("unit", "causal"), [("simt", "no"), ("mma", "yes")])
def test_the_first_panel_is_above_the_fold(unit, causal, open_page):
    page = open_page(viewport={"width": 1280, "height": 800})
    go_to(page, "orders", {"N": 256, "unit": unit, "causal": causal})
    page.evaluate("scrollTo(0, 0)")
    lowest = page.evaluate("""() => Math.max(...[...document.querySelectorAll(
        "#orders .transport, #orders svg, #orders pre, #orders .said")].map(
        e => e.getBoundingClientRect().bottom))""")
    assert lowest <= 800


def test_a_link_holds_what_is_set(open_page):
    page = open_page()
    enter(page, "#orders-d", "32")
    for _ in range(5):
        page.click("#orders .transport button:has-text('Step')")
    shown, link = page.evaluate(SHOWN, "orders"), page.url
    assert "orders.d=32" in link and "orders.step=5" in link
    other = open_page(link)
    assert other.evaluate(SHOWN, "orders") == shown
    page = open_page(PAGE.as_uri() + "#traffic.N=8190&traffic.Br=0&step=x&none.a=1")
    assert page.input_value("#traffic-N") == "8190"
    assert page.input_value("#traffic-Br") == "128"  # there is no tile of 0 rows
    assert top(page, "traffic") < 2


def top(page, name):
    """How far a panel's upper edge is from the window's."""
    return abs(page.evaluate(f"document.getElementById('{name}').getBoundingClientRect().top"))


def test_a_link_holds_every_panel_and_opens_where_its_sender_was(open_page):
    page = open_page()
    enter(page, "#orders-d", "32")
    page.click("#orders .transport button:has-text('Step')")
    page.select_option("#plan-passes", "bwd")
    page.click("#plan table")
    link = page.url
    assert link.partition("#")[2].startswith("plan&orders.N=256&") and "traffic" not in {
        part.partition(".")[0] for part in link.split("&")
    }
    other = open_page(link)
    assert all(other.evaluate(SHOWN, name) == page.evaluate(SHOWN, name) for name in NAMES)
    assert top(other, "plan") < 2
    enter(other, "#orders-d", "64")
    other.select_option("#plan-passes", "fwd")
    assert other.url.partition("#")[2] == "plan"  # what is as the page begins is not said
    # The same window goes to another link: what that does not say is as the page begins.
    go_to(other, "traffic", {"N": 512})
    assert other.evaluate(SHOWN, "orders") == open_page().evaluate(SHOWN, "orders")


@pytest.mark.parametrize("name", ["orders", "softmax"])
def test_a_panel_steps_to_its_end(name, open_page):
    page = open_page()
    small = {"N": 96, "Br": 32, "Bc": 48} if name == "orders" else {}
    go_to(page, name, drawn_states(panels()[name], 1)[0] | small)
    slider = f"#{name} .transport input"
    last = int(page.get_attribute(slider, "max"))
    for at in range(1, last + 1):
        page.click(f"#{name} .transport button:has-text('Step')")
        assert page.input_value(slider) == str(at)
        assert page.inner_text(f"#{name} .transport output") == f"step {at + 1} of {last + 1}"
    if name == "orders":
        for order in ("fa1", "fa2"):
            assert page.inner_text(f"[data-key='{order}.now']") == page.inner_text(
                f"[data-key='{order}.total']"
            )
        assert page.locator("#orders .tile.now").count() == 0
    page.click(f"#{name} .transport button:has-text('First')")
    page.click(f"#{name} .transport button:has-text('Play')")
    page.wait_for_function("([s]) => Number(document.querySelector(s).value) > 0", arg=[slider])
    page.click(f"#{name} .transport button:has-text('Pause')")


def test_what_moves_is_marked(open_page):
    page = open_page()
    go_to(
        page,
        "orders",
        {"N": 64, "d": 16, "Br": 32, "Bc": 32, "causal": "no", "window": 0, "unit": "simt"},
    )
    said = set()
    while True:
        fa1 = page.locator("#orders .sides > div").first
        lit = fa1.locator("pre .lit").all_inner_texts()
        text = page.inner_text("#orders .said").split(" FA-2 ")[0]
        if "FA-1 has ended" in text:
            break
        kind = "store" if "stores O" in text else "again" if "loads O" in text else "load"
        assert fa1.locator(f"rect.{kind}").count() == (1 if kind == "load" else 3), text
        line = {"store": "lines 12, 13", "again": "line 8", "load": "load"}[kind]
        assert any(line in each for each in lit), (text, lit)
        said.add(kind)
        page.click("#orders .transport button:has-text('Step')")
    assert said == {"load", "again", "store"}


def test_the_keyboard_alone_is_enough(open_page):
    page = open_page()
    names = set()
    for _ in range(160):
        page.keyboard.press("Tab")
        found = page.evaluate("""() => {
            const e = document.activeElement;
            return [e.closest("section")?.id || "", e.id || e.textContent.slice(0, 9) || e.type];
        }""")  # fmt: skip
        if tuple(found) in names:
            continue  # round again
        names.add(tuple(found))
        if found[1] == "orders-causal":
            page.keyboard.press("ArrowDown")
        if found[0] == "orders" and found[1] == "Step":
            page.keyboard.press("Enter")
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            assert "step 4 of" in page.inner_text("#orders .transport output")
        if found[1] == "traffic-N":
            page.keyboard.press("ArrowUp")
    assert "orders.causal=yes" in page.url and page.input_value("#orders-causal") == "yes"
    assert page.input_value("#traffic-N") == "4097"
    for name in NAMES:
        axes = [a for a in panels()[name].axes if not (name == "traffic" and a == "M")]
        assert {(name, f"{name}-{axis}") for axis in axes} <= names
    assert {
        (n, b) for n in ("orders", "softmax") for b in ("First", "Play", "Step", "Last")
    } <= names


def test_traffic_is_drawn_as_bars(open_page):
    page = open_page()
    state = {name: axis.values[-1] for name, axis in panels()["plan"].axes.items()}
    go_to(page, "plan", state | {"passes": "fwd"})
    answer = panels()["plan"].at(**state | {"passes": "fwd"})
    wide = page.evaluate("""() => [...document.querySelectorAll("#plan .bar i")].map(
        e => parseFloat(e.style.width))""")
    values = [answer[f"{name}.{kind}"] for name, _ in panels()["plan"].columns
              if f"{name}.refused" not in answer for kind in ("bytes", "dram")]  # fmt: skip
    assert wide == pytest.approx([78 * value / max(values) for value in values], rel=1e-3)


def test_every_input_has_a_label_and_numbers_are_announced(open_page):
    page = open_page()
    bare = page.evaluate("""() => [...document.querySelectorAll("input, select")].filter(
        e => !e.labels?.length && !e.getAttribute("aria-label")).map(e => e.outerHTML)""")
    assert bare == []
    assert page.locator(".said[aria-live=polite]").count() == len(NAMES)
    go_to(page, "traffic", {"N": 1024})
    cells = [page.inner_text(f"td[data-key='{name}.bytes']") for name in ("fa1", "fa2")]
    said = page.inner_text("#traffic .said")
    assert said.endswith(f"FA-1 {cells[0]}, FA-2 {cells[1]}.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_overflows_and_the_theme_is_the_systems(width, scheme, open_page):
    page = open_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name in NAMES:
        go_to(page, name, drawn_states(panels()[name], 1, seed=3)[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}[scheme]
    outside = page.evaluate("""() => [...document.querySelectorAll("main *")].filter(e => {
        const box = e.getBoundingClientRect();
        return box.right > innerWidth + 1 && !e.closest(".scroll, pre, svg");
    }).map(e => e.outerHTML.slice(0, 99))""")  # fmt: skip
    assert outside == []
    page.click("#softmax .transport button:has-text('Last')")
    assert page.evaluate(FAINT) == []


def test_a_panel_begins_with_a_question_and_its_answer(open_page):
    page = open_page()
    for name in NAMES:
        question, sentence = page.locator(f"#{name} .question"), page.locator(f"#{name} .sentence")
        assert question.inner_text().endswith("?") and sentence.inner_text().endswith(".")
        first = page.evaluate(
            "name => [...document.getElementById(name).children].map(e => e.className)", name
        )
        assert first[1:4] == ["question", "sentence", "inputs"]


@pytest.mark.parametrize(("motion", "step"), [("reduce", 1), ("no-preference", 3)])
def test_who_wants_less_motion_has_fewer_steps_a_second(motion, step, open_page):
    page = open_page(reduced_motion=motion)
    page.evaluate("window.setInterval = (step, wait) => { window.wait = wait; return 1; }")
    page.click("#softmax .transport button:has-text('Play')")
    assert page.evaluate("window.wait") == 1500 / step
    style = "e => [...document.querySelectorAll('*')].filter(e => { const s = getComputedStyle(e);"
    style += "return s.animationName !== 'none' || s.transitionDuration !== '0s'; }).length"
    assert page.evaluate(style) == 0


def test_what_moves_is_in_sight_as_one_steps_through_it(open_page):
    page = open_page(viewport={"width": 400, "height": 700})
    page.locator("#orders svg").last.scroll_into_view_if_needed()
    page.click("#orders .transport button:has-text('Step')")
    assert page.evaluate("""() => {
        const box = document.querySelectorAll("#orders svg")[1].getBoundingClientRect();
        return box.top > 0 && box.bottom < innerHeight;
    }""")


def test_it_is_there_in_a_second_and_steps_at_once(open_page):
    page = open_page()
    ready = page.evaluate("performance.getEntriesByName('ready')[0].startTime")
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    painted = page.wait_for_function(paint).json_value()
    assert ready < 1000 and painted < 1000, (ready, painted)  # milliseconds
    changes = {
        "#orders .transport input": range(9),
        "#traffic label:has(#traffic-N) input[type=range]": range(20),
        "#orders label:has(#orders-d) input[type=range]": range(9),
        "#plan-gpu": ("A100", "H100", "RTX 4090"),
    }  # fmt: skip
    for selector, values in changes.items():
        taken = sorted(page.evaluate(TIMED, [selector, str(value)]) for value in values)
        assert taken[len(taken) // 2] < 100, (selector, taken)


def test_without_a_script_it_says_so_and_shows_the_figures(browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(PAGE.as_uri())
    assert "Without JavaScript" in page.inner_text("noscript, main + p, body")
    sizes = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(sizes) == 3 and min(sizes) > 100
    context.close()


# --- served ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    from experiments.beside import explore_server

    with explore_server.Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def until(page, selector, text):
    """Wait until an element has a text."""
    page.wait_for_function(
        "([at, text]) => document.querySelector(at)?.textContent.includes(text)",
        arg=[selector, text],
    )


def enter(page, selector, value):
    page.fill(selector, value)
    page.dispatch_event(selector, "change")


def test_the_served_page_runs_sizes_of_the_readers_own(url, open_page):
    page = open_page(url)
    enter(page, "#plan-N", "1000")
    state = {name: axis.first or axis.values[0] for name, axis in panels()["plan"].axes.items()}
    answer = panels()["plan"].at(**state | {"N": 1000})
    until(page, "#plan [data-key='fa2.grid']", answer["fa2.grid"])
    assert all(shown_as(*shown, answer[key]) for key, *shown in page.evaluate(SHOWN, "plan"))
    enter(page, "#softmax-scores", "2 7 1 8 2 8")
    page.wait_for_selector("#softmax .scores span:nth-child(6)")
    assert page.input_value("#softmax-example") == "own"
    for axis, value in (("N", 50), ("d", 16), ("Br", 16), ("Bc", 16)):
        enter(page, f"#orders-{axis}", str(value))
    assert page.locator("#orders .tile.never").count() == 0
    enter(page, "#orders-mask", "i - j < 9")
    page.wait_for_selector("#orders .tile.never")


def test_the_served_page_says_what_is_refused_and_stays_up(url, open_page):
    page = open_page(url)
    for selector, value, message in (
        ("#orders-mask", "j <", "the mask 'j <' contains a syntax error"),
        ("#orders-N", "513", "N must be an integer from 1 to 512, got 513"),
        ("#traffic-N", "0", "N must be an integer from"),
        ("#softmax-scores", "1 two", "each score must be a number from -10000 to 10000, got 'two'"),
        ("#plan-N", "0", "N must be an integer from"),
    ):
        enter(page, selector, value)
        name = selector[1:].split("-")[0]
        until(page, f"#{name} .refused", message)
    enter(page, "#plan-N", "77")
    until(page, "#plan .said", "bytes loaded and stored")
