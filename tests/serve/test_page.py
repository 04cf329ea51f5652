"""The chat in a browser."""

import json
from threading import Event

import pytest

from tests.helpers.browser import needs_browser, opened, started_browser
from tests.helpers.serving import serving, wait_until_idle

pytestmark = needs_browser
CHAT = "**/v1/chat/completions"
TEXT = """# Title

**bold** _it_ `code` <img src=x onerror="hacked=1"> a_b_c [a](https://a.b/c_(d)) [bad](javascript:hacked=1) ![x](http://i)

1. one
   - sub
2. two

> quote

| a | b |
|---|--:|
| `x|y` | 2 |

```python
if 1:
    print("`<b>`")
```
"""


@pytest.fixture(scope="module")
def browser():
    with started_browser() as started:
        yield started


@pytest.fixture
def chat(browser, server):
    """The page of the server, `expect`, and the bodies of the requests for answers."""
    with opened(browser, server[0], width=1000) as (page, expect):
        bodies = []
        page.on(
            "request", lambda request: bodies.append(request.post_data_json) if "completions" in request.url else None
        )
        expect(page.locator("#exact")).to_have_text("exact")
        set_fields(page, max_tokens=12)
        yield page, expect, bodies


def set_fields(page, **fields):
    page.click("#open-settings")
    for name, value in fields.items():
        field = page.locator(f"#settings [name={name}]")
        field.select_option(value) if name == "mode" else field.fill(str(value))
    page.click("#settings .primary")


def send(page, text):
    page.fill("#message", text)
    page.keyboard.press("Enter")
    page.locator("#send").wait_for()


def answer_with(page, text, reasoning=""):
    """Answer each chat with a text, without the server."""
    speculation = {"tokens": [text], "from_draft": [False]}
    speculation["drafts"] = {"tokens": [], "parents": [], "accepted": [], "source": []}
    delta = {"content": text, "reasoning_content": reasoning}
    choice = {"delta": delta, "finish_reason": "stop", "speculation": speculation}
    event = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(body=event, content_type="text/event-stream"))


def fits(page):
    return page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_turns_are_kept_edited_and_regenerated(chat):
    page, expect, bodies = chat
    set_fields(page, system="Be short.")
    send(page, "Hi")
    send(page, "And you?")
    first = page.locator("section > .text").first.inner_text().strip()
    assert [each["role"] for each in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert first in bodies[1]["messages"][2]["content"]
    expect(page.locator("#context")).to_contain_text("of 256 tokens")
    page.get_by_title("Regenerate").last.click()
    expect(page.get_by_text("2 / 2")).to_be_visible()
    assert bodies[2] == bodies[1]
    page.get_by_title("Earlier answer").click()
    expect(page.get_by_text("1 / 2")).to_be_visible()
    page.get_by_title("Edit message").first.click()
    page.get_by_label("Message").first.fill("Hello")
    page.keyboard.press("Enter")
    page.locator("#send").wait_for()
    expect(page.locator("article")).to_have_count(2)
    assert bodies[3]["messages"][1:] == [{"role": "user", "content": "Hello"}]
    with page.expect_download() as download:
        page.click("#export")
        page.click("#export-json")
    assert json.loads(download.value.path().read_text())["messages"][1]["content"] == "Hello"
    page.reload()
    page.locator("#chats .name", has_text="Hello").click()
    expect(page.locator("article")).to_have_count(2)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_title("Delete Hello").click()
    expect(page.locator("article, #chats li")).to_have_count(0)


def test_settings_are_sent(chat):
    page, _, bodies = chat
    fields = {"temperature": 0.5, "max_tokens": 3, "top_p": 0.9, "top_k": 7, "seed": 5, "k": 2}
    set_fields(page, **fields)
    send(page, "Hi")
    assert {name: bodies[0][name] for name in fields} == fields


def test_stop_frees_the_sequence(chat, server, monkeypatch):
    page, expect, _ = chat
    step = server[1].engine.step
    gate = Event()

    def held_step():
        done = step()
        gate.wait(10)
        return done

    monkeypatch.setattr(server[1].engine, "step", held_step)
    page.fill("#message", "Hi")
    page.keyboard.press("Enter")
    page.locator("#stop").wait_for()
    page.keyboard.press("Escape")
    expect(page.get_by_text("Stopped.")).to_be_visible()
    gate.set()
    wait_until_idle(server[1])


def test_markdown_is_shown_and_html_stays_text(chat):
    page, expect, _ = chat
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, TEXT, reasoning="because")
    send(page, "Hi")
    shown = page.locator("section > .text")
    expect(shown).to_contain_text('<img src=x onerror="hacked=1"> a_b_c')
    assert page.evaluate("() => [window.hacked, document.querySelectorAll('#turns img').length]") == [None, 0]
    assert shown.locator("a").evaluate_all("all => all.map((each) => each.href)") == ["https://a.b/c_(d)", "http://i/"]
    for selector in ("h3", "strong", "em", "ol > li > ul > li", "blockquote", "td code"):
        assert shown.locator(selector).count() == 1
    assert shown.locator("td").all_inner_texts() == ["x|y", "2"]
    page.get_by_text("Copy", exact=True).click()
    assert page.evaluate("() => navigator.clipboard.readText()") == 'if 1:\n    print("`<b>`")'
    expect(page.get_by_text("because")).to_be_hidden()
    page.get_by_text("Reasoning", exact=True).last.click()
    expect(page.get_by_text("because")).to_be_visible()


def test_markdown_that_grows_is_shown_as_the_whole(chat):
    same = """async (source) => {
        const {renderMarkdown} = await import("./page/markdown.js");
        const [live, whole] = [document.createElement("div"), document.createElement("div")];
        const emitter = (text) => (to, a, b) => to.append(text.slice(a, b));
        const show = (node, text, open) => renderMarkdown(node, text, {open, emit: emitter(text)});
        for (let i = 0; i < source.length; i++) show(live, source.slice(0, i), true);
        show(live, source);
        show(whole, source);
        return live.innerHTML === whole.innerHTML && live.children.length;
    }"""
    assert chat[0].evaluate(same, TEXT) == 6


def test_text_files_are_attached(chat):
    page, expect, bodies = chat
    set_fields(page, max_tokens=2)
    page.set_input_files("#file-input", [{"name": "a.md", "mimeType": "", "buffer": b"```\n"}])
    expect(page.locator("#files")).to_contain_text("tokens")
    drop = """() => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File(["b"], "b.txt"));
        window.dispatchEvent(new DragEvent("drop", {dataTransfer}));
    }"""
    page.evaluate(drop)
    expect(page.locator("#files li")).to_have_count(2)
    for name, data, message in (("c", b"\xff", "not a text"), ("d", b"word " * 600, "Attach a part")):
        page.set_input_files("#file-input", [{"name": name, "mimeType": "", "buffer": data}])
        expect(page.locator("#error")).to_contain_text(message)
    send(page, "Read")
    assert bodies[0]["messages"][0]["content"] == "Read\n\na.md:\n````\n```\n````\n\nb.txt:\n```\nb\n```"
    page.locator(".file summary").first.click()
    expect(page.locator(".file pre").first).to_be_visible()


def test_errors_have_the_text_of_the_server(chat):
    page, expect, _ = chat
    send(page, "word " * 600)
    expect(page.locator(".note.error")).to_contain_text("shorten the prompt")
    page.route(CHAT, lambda route: route.abort())
    page.get_by_title("Regenerate").click()
    expect(page.locator(".note.error")).to_have_text("The server cannot be reached.")


def test_drafts_are_shown_and_compared(chat):
    page, expect, bodies = chat
    set_fields(page, mode="prompt", max_tokens=20)
    page.click("#drafts")
    page.click("#compare")
    send(page, "a = 1\nb = 1\nc = 1\n")
    expect(page.locator("section h3")).to_contain_text(["With drafts", "Plain decoding"])
    expect(page.locator(".verdict")).to_contain_text("Both texts are equal.")
    drafted, plain = bodies
    assert plain["k"] == 0
    assert drafted["user"] != plain["user"]
    speculative, other = page.locator("section").all()
    assert speculative.locator(".text mark").count() > 0
    assert other.locator(".text :is(mark, s)").count() == 0
    expect(page.locator("#legend")).to_contain_text("ngram drafted and accepted")
    expect(page.locator(".figures summary").first).to_contain_text("of draft tokens accepted")
    assert page.locator("[title*='rejected: ']").count() > 0
    assert page.locator(".text s").count() == 0
    page.check("#rejected")
    assert page.locator(".text s").count() > 0
    text = page.evaluate("() => [...document.querySelectorAll('.text.raw s')].map((each) => each.remove())")
    assert text
    assert speculative.locator(".raw").inner_text() == other.locator(".raw").inner_text()


def test_a_model_without_chat_template_continues_a_text(browser, server, monkeypatch):
    monkeypatch.setattr(server[1].codec.tokenizer, "chat_template", None)
    with opened(browser, server[0]) as (page, expect):
        expect(page.locator("#about")).to_contain_text("the model continues a text")
        set_fields(page, max_tokens=4)
        send(page, "def add(a, b):")
        with page.expect_request("**/v1/completions") as request:
            page.keyboard.press("Enter")
        text = page.locator("article .raw").first.inner_text()
        assert request.value.post_data_json["prompt"].startswith("def add(a, b):" + text[:2])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_and_small_screens(browser, server, scheme):
    with opened(browser, server[0], width=360, color_scheme=scheme) as (page, expect):
        answer_with(
            page, "x" * 300 + "\n\n" + "|a|b|\n|-|-|\n|" + "long " * 60 + "|" + "y" * 90 + "|\n\n```\n" + "z" * 200
        )
        expect(page.locator("#exact")).to_have_text("exact")
        page.click("#compare")
        page.click("#drafts")
        send(page, "w" * 300)
        page.locator(".figures summary").first.click()
        assert fits(page)
        page.click("#menu")
        expect(page.locator("#new-chat")).to_be_visible()
        contrast = """() => {
            const probe = document.body.appendChild(document.createElement("i"));
            const light = (name) => {
                probe.style.color = `var(--${name})`;
                const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map((each) => {
                    const share = each / 255;
                    return share <= .04045 ? share / 12.92 : ((share + .055) / 1.055) ** 2.4;
                });
                return .2126 * r + .7152 * g + .0722 * b + .05;
            };
            const names = ["muted side", "muted soft", "muted card", "bad bad-page", "bad page", "good page",
                "on-fast fast", "fast page", ...[0, 1, 2, 3, 4].map((i) => "ink by" + i)];
            const pairs = names.map((pair) => pair.split(" ").map(light));
            return Math.min(...pairs.map((pair) => Math.max(...pair) / Math.min(...pair)));
        }"""
        assert page.evaluate(contrast) >= 4.5
        page.click("#theme")
        page.reload()
        assert page.evaluate("() => getComputedStyle(document.documentElement).colorScheme") == "light"


def test_the_page_asks_for_a_key_and_works_behind_a_path(browser):
    with serving(api_key=["secret"]) as (url, _), opened(browser, "about:blank") as (page, expect):
        page.route(
            "**/proxy/**",
            lambda route: route.fulfill(response=route.fetch(url=route.request.url.replace("/proxy", ""))),
        )
        page.goto(url + "/proxy/")
        for key, dialogs in (("wrong", 1), ("secret", 0)):
            expect(page.locator("#key-error")).to_contain_text("the API key is missing or wrong")
            page.fill("#key", key)
            page.keyboard.press("Enter")
            expect(page.locator("#ask-key[open]")).to_have_count(dialogs)
        expect(page.locator("#model")).to_have_text("nano")
        set_fields(page, max_tokens=4)
        send(page, "Hi")
        expect(page.locator(".figures b")).to_contain_text("tokens/s")


def test_the_page_waits_for_a_server_that_loads(browser, server):
    with opened(browser, "about:blank") as (page, expect):
        state = {"status": "loading", "stage": "reading x", "done_bytes": 40, "total_bytes": 100}
        page.route("**/v1/models", lambda route: route.fulfill(status=503, json={}))
        page.route("**/health", lambda route: route.fulfill(status=503, json=state))
        page.goto(server[0])
        expect(page.locator("#model")).to_have_text("The server is reading x, 40%")
        page.unroute("**/v1/models")
        expect(page.locator("#model")).to_have_text("nano")
