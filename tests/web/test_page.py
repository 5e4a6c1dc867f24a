"""The page in a real browser: Debian's chromium, driven by Playwright."""

import re
import shutil

import pytest
from agents import randomise, tiny_config
from PIL import Image
from serving import RunningServer, bomb
from zooing import glyph_scenes, small

import stam
from stam.web import LookService, Service
from stam.web.scenes import SampleScene

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")
expect = playwright.expect
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--use-fake-device-for-media-stream",
]


@pytest.fixture(scope="module")
def url(web_agent):
    web_agent.configure(
        labels=("ant", "sea_horse", "a kind of cat with a very long name", "PolarBear", "eel")
    )
    with RunningServer(Service(web_agent, "tiny")) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, url):
    """Opens the page and fails the test afterwards if the page complained or asked anybody else."""
    contexts, problems, posted = [], [], []

    def open_page(width=1280, height=800, expect_problems=False, query="?play=0", **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)

        def heard(request):
            if not request.url.startswith((url, "blob:", "data:")):
                problems.append(request.url)
            if request.method == "POST" and "/glimpses" in request.url:
                posted.append(len(request.post_data_buffer))

        page.on("request", heard)
        page.on("pageerror", lambda error: problems.append(str(error)))
        if not expect_problems:
            page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.goto(url + "/" + query)
        page.wait_for_selector("body.ready")
        return page

    open_page.posted = posted
    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def seen(page):
    return page.locator("#board .seen")


def test_it_opens_with_a_scene_ready_and_covered(visit):
    page = visit()
    expect(page).to_have_title(re.compile("STAM"))
    expect(page.locator("#board button")).to_have_count(12)
    expect(seen(page)).to_have_count(0)
    expect(page.locator("#board .next")).to_have_count(1)
    expect(page.locator("#status")).to_contain_text("Nothing seen yet")
    thumbnails = page.locator("#thumbnails button")
    expect(thumbnails.first).to_have_attribute("aria-current", "true")
    names = [each.get_attribute("aria-label") for each in thumbnails.all()]
    assert names == [f"Scene {number + 1}" for number in range(len(names))]  # none says what it shows
    expect(page.locator("#scene-name")).to_have_text("Scene 1")
    expect(page.locator(".rival figcaption b")).to_have_text(["Random", "Spiral"])
    expect(page.locator("#bars li")).to_have_count(5)


def test_step_back_and_only_the_glimpses_are_sent(visit):
    page = visit()
    page.locator("#threshold").fill("100")
    for count in (1, 2, 3):
        page.click("#step")
        expect(seen(page)).to_have_count(count)
        expect(page.locator("#seen-text")).to_contain_text(f"{count} of 12 glimpses")
    expect(page.locator("#label")).to_have_text(
        re.compile("^(ant|sea horse|a kind of cat.*|Polar bear|eel)$")
    )
    expect(page.locator("#confidence")).to_have_text(re.compile(r"\d+% sure"))
    expect(page.locator("#rival-random .seen")).to_have_count(3)
    expect(page.locator("#announcer")).to_contain_text("Glimpse 3 at row")
    page.click("#back")
    expect(seen(page)).to_have_count(2)
    page.click("#back")
    page.click("#back")
    expect(page.locator("#back")).to_be_disabled()
    page.click("#step")
    expect(seen(page)).to_have_count(1)
    assert visit.posted == [8 * 8 * 3] * 9  # three sessions, three steps; going back asks nothing


def test_play_runs_to_the_threshold_and_the_slider_moves_the_end(visit):
    page = visit()
    page.locator("#threshold").fill("100")
    page.click("#play")
    expect(page.locator("#play")).to_have_attribute("aria-label", "Pause")
    expect(seen(page).nth(2)).to_be_visible()  # three or more: it plays on while we look
    page.click("#play")
    expect(page.locator("#play")).to_have_attribute("aria-label", "Play")
    count = seen(page).count()
    page.locator("#threshold").fill("0")
    expect(page.locator("#status")).to_contain_text("it stops")
    expect(seen(page)).to_have_count(1)
    expect(page.locator("#board.sure")).to_have_count(1)
    page.locator("#threshold").fill("100")
    expect(seen(page)).to_have_count(count)


def test_a_scene_is_looked_at_from_its_centre(visit):
    page = visit()
    page.click("#step")
    expect(seen(page)).to_have_count(1)
    expect(page.locator("#board button").nth(6)).to_have_class(re.compile(r"\bseen\b"))  # row 1, column 2


def test_it_looks_on_past_its_stop_when_told_to(visit):
    page = visit()
    page.locator("#threshold").fill("0")
    page.click("#step")
    expect(page.locator("#status")).to_contain_text("it stops")
    page.click("#step")
    expect(seen(page)).to_have_count(2)
    expect(page.locator("#status")).to_contain_text("Looking on")
    for _ in range(10):
        page.click("#step")
    expect(seen(page)).to_have_count(12)
    expect(page.locator("#status")).to_contain_text("Everything has been seen")
    expect(page.locator("#step")).to_be_disabled()


def test_a_click_overrules_the_agent(visit):
    page = visit()
    page.locator("#threshold").fill("100")
    page.click("#step")
    expect(seen(page)).to_have_count(1)  # the first square may be the one it is about to see
    covered = page.locator("#board button:not(.seen):not(.next)").first
    name = covered.get_attribute("aria-label")
    covered.click()
    expect(seen(page)).to_have_count(2)
    chosen = page.locator("#board .overruled")
    expect(chosen).to_have_count(1)
    assert chosen.get_attribute("aria-label").startswith(name.split(", covered")[0])
    page.click("#step")
    page.click("#back")
    page.click("#back")
    expect(seen(page)).to_have_count(1)
    page.locator("#board button:not(.seen)").last.click()  # another past: the session is rewound
    expect(seen(page)).to_have_count(2)
    page.click("#step")
    expect(seen(page)).to_have_count(3)
    expect(page.locator("#toast")).to_be_hidden()


def test_it_works_by_keyboard(visit):
    page = visit()
    page.locator("#threshold").fill("100")
    page.locator("body").click(position={"x": 2, "y": 2})
    page.keyboard.press("ArrowRight")
    expect(seen(page)).to_have_count(1)
    page.keyboard.press("ArrowRight")
    expect(seen(page)).to_have_count(2)
    page.keyboard.press("ArrowLeft")
    expect(seen(page)).to_have_count(1)
    page.keyboard.press("p")
    expect(page.locator("#peek")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("n")
    expect(page.locator("#thumbnails [aria-current]")).to_have_attribute("aria-label", "Scene 2")
    expect(seen(page)).to_have_count(0)
    page.keyboard.press("?")
    expect(page.locator("#help-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help-dialog")).to_be_hidden()
    page.locator("#board button").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#board button:focus")).to_have_attribute("aria-label", re.compile("row 2, column 2"))
    page.keyboard.press("Enter")
    expect(page.locator("#board button:focus")).to_have_attribute("aria-label", "row 2, column 2, glimpse 1")


def test_an_image_of_ones_own_and_a_broken_one(visit, tmp_path):
    page = visit(expect_problems=True)
    Image.new("RGB", (300, 200), (200, 30, 30)).save(tmp_path / "mine.jpg")
    page.locator("#file").set_input_files(tmp_path / "mine.jpg")
    expect(page.locator("#thumbnails [aria-current]")).to_have_attribute("aria-label", "mine.jpg")
    expect(page.locator("#scene-name")).to_have_text("Your image")
    page.click("#step")
    expect(seen(page)).to_have_count(1)
    files = {"broken.png": (b"no image", "cannot be read"), "bomb.png": (bomb(), "too many pixels")}
    for name, (data, words) in files.items():
        (tmp_path / name).write_bytes(data)
        page.locator("#file").set_input_files(tmp_path / name)
        expect(page.locator("#toast")).to_contain_text(words)
    expect(seen(page)).to_have_count(1)  # the scene before is still there


def test_a_session_that_expired_is_opened_again(visit, url):
    page = visit(expect_problems=True)
    page.locator("#threshold").fill("100")
    page.click("#step")
    expect(seen(page)).to_have_count(1)
    gone = {"status": 404, "json": {"error": "gone"}}
    page.route(re.compile("/glimpses"), lambda route: route.fulfill(**gone), times=1)
    page.click("#step")
    expect(seen(page)).to_have_count(2)
    expect(page.locator("#toast")).to_be_hidden()


def test_an_answer_that_is_lost_is_asked_for_again(visit):
    page = visit(expect_problems=True)
    page.locator("#threshold").fill("100")
    page.click("#step")
    expect(seen(page)).to_have_count(1)

    answers_to_lose = 1

    def maybe_lose(route):
        nonlocal answers_to_lose
        if answers_to_lose == 0:
            route.continue_()
            return
        answers_to_lose -= 1
        route.fetch()  # the service takes the glimpse, and the page never hears of it
        route.abort()

    page.route(re.compile("/glimpses"), maybe_lose)
    page.click("#step")
    expect(seen(page)).to_have_count(2)
    answers_to_lose = 6  # three ways of looking, each tried twice
    page.click("#step")
    expect(page.locator("#toast")).to_contain_text("does not answer")
    answers_to_lose = 0
    page.locator("#board button:not(.seen):not(.next)").first.click()  # elsewhere: the session is ahead of us
    expect(seen(page)).to_have_count(3)
    page.click("#step")
    expect(seen(page)).to_have_count(4)


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(390, 844, "dark"), (390, 844, "light"), (768, 1024, "light"), (1280, 800, "dark")],
)
def test_it_fits_phone_tablet_and_laptop(visit, width, height, scheme, tmp_path):
    page = visit(width, height, color_scheme=scheme, reduced_motion="reduce")
    page.locator("#threshold").fill("100")
    page.click("#step")
    expect(seen(page)).to_have_count(1)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    for name in ("#play", "#step", "#back", "#peek", "#restart", "#speed", "#share", "#board", "#threshold"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        if name != "#threshold":
            assert min(box["width"], box["height"]) >= 40
    if width == 1280:  # the scene and its controls are in sight without scrolling
        assert page.locator("#threshold").bounding_box()["y"] + 20 < height
    colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", colour)[:3])) < 200
    assert dark == (scheme == "dark")
    shot = page.screenshot(path=tmp_path / "page.png")
    assert len(shot) > 10_000


def test_it_plays_at_once_and_faster_on_demand(visit):
    page = visit(query="")
    expect(seen(page).nth(1)).to_be_visible()
    page.click("#speed")
    expect(page.locator("#speed")).to_have_attribute("aria-label", "Speed: 2 times")
    page.click("#thumbnails li:nth-child(2) button")
    expect(page.locator("#scene-name")).to_contain_text("Scene 2")
    expect(seen(page).nth(1)).to_be_visible()


def test_less_motion_asked_for_plays_nothing(visit):
    page = visit(query="", reduced_motion="reduce")
    page.wait_for_timeout(300)
    expect(seen(page)).to_have_count(0)


def test_unsure_when_all_is_seen_and_names_are_readable_and_unbroken(visit):
    page = visit(query="?scene=1&play=0")
    page.locator("#threshold").fill("100")
    page.click("#speed")
    page.click("#speed")
    page.click("#play")
    expect(page.locator("#label")).to_have_text("unsure", timeout=30_000)
    expect(page.locator("#confidence")).to_have_text(re.compile(r"^probably [^_]+ \(\d+%\)$"))
    expect(page.locator("#status")).to_contain_text("not sure enough")
    expect(page.locator("#scene-name")).to_contain_text("Scene 2: ")
    names = page.locator(".bar-name").all_inner_texts()
    assert "sea horse" in names and "Polar bear" in names
    for words in ("a kind of cat with a very long name", "english springer", "unsure"):
        kept = page.evaluate(
            """async (words) => {
              const { writeLarge } = await import("./words.js");
              const label = document.getElementById("label");
              writeLarge(label, words);
              const style = getComputedStyle(label);
              return style.overflowWrap === "normal" && label.scrollWidth <= label.clientWidth + 1;
            }""",
            words,
        )
        assert kept


def test_a_look_is_saved_as_a_gif(visit):
    page = visit()
    page.locator("#threshold").fill("100")
    for count in (1, 2, 3):
        page.click("#step")
        expect(seen(page)).to_have_count(count)
    with page.expect_download() as download:
        page.click("#share")
    with Image.open(download.value.path()) as gif:
        assert gif.format == "GIF" and gif.n_frames == 4  # the cover and three glimpses


def test_a_picture_from_the_camera(visit):
    page = visit(permissions=["camera"])
    page.click("#camera")
    page.click("#camera-dialog .take")  # waits until it is enabled
    expect(page.locator("#camera-dialog")).to_be_hidden()
    expect(page.locator("#thumbnails [aria-current]")).to_have_attribute("aria-label", "Camera")
    page.click("#step")
    expect(seen(page)).to_have_count(1)


def test_two_agents_side_by_side(browser, web_agent):
    other = stam.Agent(tiny_config(labels=tuple("xyz"), num_classes=3, image_size=(16, 24))).eval()
    randomise(other)
    service = Service(web_agent, "one", beside=Service(other.eval(), "two", scenes=()))
    with RunningServer(service) as address:
        page = browser.new_page()
        page.goto(f"{address}/?play=0")
        page.wait_for_selector("body.ready")
        page.locator("#threshold").fill("100")
        page.click("#step")
        page.click("#step")
        expect(seen(page)).to_have_count(2)
        expect(page.locator("#rival-beside .seen")).to_have_count(2)
        expect(page.locator(".rival b")).to_have_text(["two"])
        expect(page.locator("#result-beside")).to_have_text(re.compile(r"\d+% sure · [xyz]"))
        page.close()


def test_a_system_of_the_zoo_plays_its_looks(browser):
    glyphs = glyph_scenes()
    scenes = [SampleScene(f"Glyph {n}", "x", lambda n=n: glyphs.load(n)) for n in range(3)]
    problems = []
    with RunningServer(LookService(small("gfnet"), "gfnet", scenes=scenes)) as address:
        page = browser.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        expect(page.locator("#status")).to_have_text("Look 3 of 3.")
        expect(page.locator("#scene-name")).to_have_text("Scene 1: Glyph 0")
        expect(page.locator("#truth")).to_contain_text(re.compile("right|it is"))
        page.click("#back")
        expect(page.locator("#status")).to_have_text("Look 2 of 3.")
        expect(page.locator("#truth")).to_be_hidden()
        page.click("#thumbnails li:nth-child(2) button")
        expect(page.locator("#scene-name")).to_contain_text("Scene 2")
        page.close()
    assert problems == []


def test_every_control_has_a_name(visit):
    page = visit()
    for control in page.locator("button:visible, select:visible, input:visible").all():
        assert control.evaluate("e => e.ariaLabel || e.innerText || (e.labels && e.labels.length)")
