//! Tests the console in a real browser, with a real router and real servers: load, a killed replica, the chat by
//! keyboard, API keys, and the layout. Screenshots are written to `console` in `CARGO_TARGET_TMPDIR`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tests::browser::{Browser, Key, Page};
use tests::http;
use tests::router::{Router, replica};
use tests::server::{Server, bare_command};
use tests::traffic::{Plan, Traffic};

/// Flags for a simulator with few sequences and a small cache, so that load is visible.
const SIM: [&str; 8] =
    ["--backend", "sim", "--sim-step-time", "10ms", "--sim-blocks", "400", "--max-num-seqs", "4"];
/// Flags for a simulator that needs most of a minute for a response, so that a test can act during the response.
const SLOW: [&str; 4] = ["--backend", "sim", "--sim-step-time", "200ms"];
/// The number of clients, which is more than the replicas can serve at the same time.
const CLIENTS: usize = 24;
/// The minimum contrast of text in level AA of the Web Content Accessibility Guidelines.
const CONTRAST_MIN: f64 = 4.5;

/// Functions for the expressions of the tests. They exist until the page is reloaded, so tests must not reload it.
const FUNCTIONS: &str = r"
    window.count = text => Number(text.replace(/[^0-9.]/g, ''));
    window.says = id => document.getElementById(id).innerText;
    window.replicas = () => Object.fromEntries([...document.querySelectorAll('#replicas tr')].map(row => [
        row.querySelector('th span').textContent,
        Object.fromEntries([...row.querySelectorAll('td')].map(cell => [cell.dataset.label, cell.innerText])),
    ]));
    window.picked = () => [...document.querySelectorAll('#picks [data-label=Picked]')].map(cell => cell.innerText);
    window.all = check => Object.values(replicas()).length === 2 && Object.values(replicas()).every(check);
    window.focused = () => document.activeElement.id || document.activeElement.getAttribute('aria-labelledby')
        || document.activeElement.className;
    window.answer = () => document.querySelector('#chat p:nth-child(even):last-child span')?.textContent ?? '';
";

/// Two servers, a router and a browser.
struct Scene {
    servers: Vec<Server>,
    router: Router,
    browser: Browser,
}

impl Scene {
    fn new(sim: &[&str], arguments: &[String]) -> Self {
        let servers: Vec<Server> = (0..2).map(|_| start(sim, "0", "0")).collect();
        let all: Vec<String> = servers.iter().map(replica).chain(arguments.iter().cloned()).collect();
        let router = Router::start(&all).expect("the router starts");
        let browser = Browser::start().expect("the browser starts");
        Self { servers, router, browser }
    }

    /// Opens the console and waits until it shows both replicas.
    fn console(&self) -> Console<'_> {
        let console = self.bare_console();
        console.await_expression("both replicas to serve", "all(replica => replica.State === 'serving')");
        console
    }

    fn bare_console(&self) -> Console<'_> {
        let page = self.browser.open(&self.router.url("/console")).expect("the page opens");
        page.evaluate(FUNCTIONS).unwrap();
        Console { page, router: &self.router }
    }

    fn traffic(&self) -> Traffic {
        let url = self.router.url("");
        Traffic::start(&Plan {
            url,
            model: "sim".to_owned(),
            clients: CLIENTS,
            tokens: 60,
            pause: Duration::ZERO,
        })
    }
}

/// Starts a server on these ports. Unless it simulates images, it uses the vocabulary of a real model, which is so
/// large that the simulator hardly ever generates the end token by chance.
fn start(arguments: &[&str], port: &str, grpc_port: &str) -> Server {
    let mut command = bare_command().unwrap();
    command.args(["--host", "127.0.0.1", "--port", port, "--grpc-port", grpc_port]).args(arguments);
    // The real vocabulary has no token for images.
    if !arguments.contains(&"--sim-images") {
        command.arg("--model").arg(tests::sample_model());
    }
    command.args(["--model-name", "sim"]);
    Server::from_command(&mut command).expect("the server starts")
}

fn port(address: &str) -> &str {
    address.rsplit(':').next().unwrap()
}

/// The page of the console. If a test fails, dropping the page takes a screenshot.
struct Console<'a> {
    page: Page<'a>,
    router: &'a Router,
}

impl Console<'_> {
    #[track_caller]
    fn await_expression(&self, what: &str, expression: &str) {
        self.page.await_expression(what, expression).unwrap();
    }

    fn text(&self, expression: &str) -> String {
        self.page.text(expression).unwrap()
    }

    fn press(&self, keys: &[Key]) {
        for &key in keys {
            self.page.press(key).unwrap();
        }
    }

    /// Identifies the focused element by its ID, its label or its class.
    fn focused(&self) -> String {
        self.text("focused()")
    }

    #[track_caller]
    fn tab_to(&self, expected: &str) {
        self.press(&[Key::Tab]);
        assert_eq!(self.focused(), expected);
    }

    fn screenshot(&self, name: &str) -> anyhow::Result<PathBuf> {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("console");
        std::fs::create_dir_all(&directory)?;
        self.page.screenshot(&directory, name)
    }

    /// Asserts that the page sent requests only to its router, and that the messages in the browser's console contain
    /// the `expected` texts, in this order.
    #[track_caller]
    fn assert_well_behaved(&self, expected: &[&str]) {
        let origin = self.router.url("/");
        let requests = self.page.requests();
        assert!(requests.len() > 2, "{requests:?}");
        for url in requests {
            assert!(url.starts_with(&origin) || url.starts_with("data:"), "a request to {url}");
        }
        let messages = self.page.console_messages();
        let is_expected = messages.iter().zip(expected).all(|(one, part)| one.contains(part));
        assert!(messages.len() == expected.len() && is_expected, "{messages:#?}");
    }
}

impl Drop for Console<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            eprintln!("screenshot: {:?}", self.screenshot(&format!("failed-{test}")));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_load_of_both_replicas_is_updated_without_reloading_the_page() {
    let scene = Scene::new(&SIM, &[]);
    let console = scene.console();
    console.screenshot("idle").unwrap();
    assert_eq!(console.text("says('serving')"), "2 of 2");
    let mut traffic = scene.traffic();
    let busy =
        "Object.values(['In flight', 'Running', 'Prompt tok/s', 'Output tok/s', 'Answered', 'KV cache'])
        .every(label => count(replica[label].split('%')[0]) > 0)";
    console.await_expression("both replicas to be busy", &format!("all(replica => {busy})"));
    console.await_expression("requests to queue", "count(says('queued')) > 0");
    let shown = "count(says('in-flight')) > 0
        && count(says('output')) > 0";
    console.await_expression("the totals of a busy fleet", shown);
    console.await_expression("both replicas to be picked", "new Set(picked()).size === 2");
    console.screenshot("load").unwrap();

    // The page updates continuously unless it is paused.
    console.page.evaluate("window.before = replicas(), window.picksBefore = picks.innerText").unwrap();
    let more = "Object.entries(replicas()).every(([name, replica]) =>
        count(replica.Answered) > count(before[name].Answered)) && picks.innerText !== picksBefore";
    console.await_expression("more responses from both replicas", more);
    console.page.evaluate("document.querySelector('#pause').focus()").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the pause", "says('status') === 'Paused' && !refreshing");
    let paused = console.text("says('replicas')");
    traffic.await_requests(CLIENTS).await;
    assert_eq!(console.text("says('replicas')"), paused);
    console.press(&[Key::Enter]);
    console.await_expression("the end of the pause", "says('status') === 'Live'");

    let account = traffic.stop().await;
    assert!(account.failures().is_empty(), "{}", account.summary());
    let idle = "all(replica => replica.Running === '0' && replica['In flight'] === '0'
        && replica['Output tok/s'] === '0' && replica['KV cache'].includes('0.0% in use'))";
    console.await_expression("both replicas to be idle", idle);
    let known = http::get(&scene.router.url("/debug/replicas")).await.unwrap().body;
    let shown = console.page.evaluate("replicas()").unwrap();
    let mut sum = 0;
    for replica in known["replicas"].as_array().unwrap() {
        let answered = replica["answered"].as_u64().unwrap();
        assert_eq!(number(&shown[replica["name"].as_str().unwrap()]["Answered"]), answered);
        sum += answered;
    }
    assert!(sum >= account.requests.len() as u64, "{sum} of {}", account.requests.len());
    console.assert_well_behaved(&[]);
}

#[test]
fn an_estimated_time_has_a_unit_and_other_scores_have_none() {
    let scene = Scene::new(&SIM, &[]);
    let console = scene.console();
    // The score of a replica that does not report its load has no terms.
    for (is_score_time, shown) in [(true, "500 ms versus 2 s"), (false, "0.5 versus 2")] {
        let pick = json!({
            "at": 0,
            "model": "sim",
            "prompt_tokens": 1,
            "picked": {"replica": "a", "score": 0.5, "is_score_time": is_score_time, "cached_tokens": 0},
            "others": [{"replica": "b", "score": 2, "is_score_time": is_score_time}],
        });
        assert_eq!(console.text(&format!("pickRow({pick}).lastElementChild.textContent")), shown);
    }
}

/// Parses a whole number in the format of the page.
fn number(shown: &Value) -> u64 {
    shown.as_str().unwrap().replace(',', "").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_replica_is_shown_as_unreachable_and_after_a_restart_as_serving() {
    let mut scene = Scene::new(&SIM, &[]);
    let traffic = scene.traffic();
    let gone = scene.servers.swap_remove(0);
    let (name, grpc) = (gone.address().to_owned(), gone.grpc_address());
    let console = scene.console();
    console.await_expression("both replicas to be busy", "all(replica => count(replica.Running) > 0)");
    gone.process().signal("KILL").unwrap();
    gone.wait().unwrap();
    let row = format!("replicas()['{name}']");
    // The reason is shown below the state, and the last load report is no longer shown.
    let shown = format!(
        "{row}.State.startsWith('unreachable\\n') && ['KV cache', 'Running', 'Output tok/s']
            .every(label => {row}[label] === '–')"
    );
    console.await_expression("the replica to be unreachable", &shown);
    console.await_expression("the number of ready replicas", "says('serving') === '1 of 2'");
    console.await_expression("the announcement", "says('announcement') === '1 of 2 replicas are ready'");
    let other = scene.servers[0].address();
    console.await_expression(
        "the other replica to be busy",
        &format!("count(replicas()['{other}'].Running) > 0"),
    );
    console.await_expression(
        "only the other replica to be picked",
        &format!("picked().every(name => name === '{other}')"),
    );
    assert_eq!(console.text("says('status')"), "Live");
    console.screenshot("gone").unwrap();

    let _back = start(&SIM, port(&name), port(&grpc));
    console.await_expression(
        "the replica to serve again",
        &format!("{row}.State === 'serving' && count({row}.Running) > 0"),
    );
    drop(traffic.stop().await);
    console.assert_well_behaved(&[]);
}

#[test]
fn the_chat_streams_and_works_by_keyboard() {
    let scene = Scene::new(&SIM, &[]);
    let console = scene.console();
    console.tab_to("skip");
    console.press(&[Key::Enter]);
    assert_eq!(console.focused(), "prompt");
    let observe = "window.lengths = new Set(); new MutationObserver(() => lengths.add(answer().length))
        .observe(document.querySelector('#chat'), {childList: true, subtree: true})";
    console.page.evaluate(observe).unwrap();
    console.page.insert_text("What is").unwrap();
    console.press(&[Key::ShiftEnter]);
    console.page.insert_text("a fleet?").unwrap();
    assert_eq!(console.text("document.querySelector('#prompt').value"), "What is\na fleet?");
    assert_eq!(console.text("says('chat')"), "");
    console.press(&[Key::Enter]);
    let ended = "says('note').startsWith('The text of the answer began after')";
    console.await_expression("the answer", ended);
    let pieces = console.page.evaluate("lengths.size").unwrap();
    assert!(pieces.as_u64() > Some(4), "the response came in {pieces} pieces");
    assert!(!console.text("answer()").is_empty());
    let by = console.text("document.querySelector('#chat p:last-child b').innerText");
    let name = by.strip_prefix("sim at ").expect("the page names the replica");
    assert!(scene.servers.iter().any(|server| server.address() == name), "{by}");
    console.screenshot("answer").unwrap();

    // The second request includes the conversation so far, and is sent with the button.
    console.await_expression(
        "the pick",
        "document.querySelectorAll('#picks [data-label=\"Prompt tokens\"]').length === 1",
    );
    let first =
        "count(document.querySelector('#picks tr:last-child [data-label=\"Prompt tokens\"]').innerText)";
    console.page.evaluate(&format!("window.firstPrompt = {first}")).unwrap();
    assert_eq!(console.focused(), "prompt");
    console.page.insert_text("And a router?").unwrap();
    console.tab_to("send");
    console.press(&[Key::Enter]);
    let both = format!("document.querySelectorAll('#chat p').length === 4 && answer() && {ended}");
    console.await_expression("the second answer", &both);
    let second =
        "count(document.querySelector('#picks [data-label=\"Prompt tokens\"]').innerText) > firstPrompt";
    console.await_expression("a longer prompt", second);
    assert_eq!(console.focused(), "prompt", "the focus must not be lost with a disabled button");
    console.assert_well_behaved(&[]);
}

#[test]
fn the_chat_sends_images() {
    let scene = Scene::new(&[SIM.as_slice(), &["--sim-images"]].concat(), &[]);
    let console = scene.console();
    let choose = r"(async () => {
        const canvas = new OffscreenCanvas(20, 10);
        canvas.getContext('2d').fillRect(0, 0, 10, 10);
        const chosen = new DataTransfer();
        chosen.items.add(new File([await canvas.convertToBlob()], 'a black square.png', {type: 'image/png'}));
        document.querySelector('#images').files = chosen.files;
    })()";
    console.page.evaluate(choose).unwrap();
    console.await_expression("the image", "document.querySelector('#images').files.length === 1");
    console.page.evaluate("document.querySelector('#prompt').focus()").unwrap();
    console.page.insert_text("What is this?").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the answer", "says('note').startsWith('The text of the answer began after')");
    assert_eq!(console.text("document.querySelector('#chat img').alt"), "a black square.png");
    assert_eq!(console.text("conversation[0].content.map(part => part.type).join()"), "image_url,text");
    assert_eq!(console.text("String(document.querySelector('#images').files.length)"), "0");
    console.screenshot("image").unwrap();
    // The next question continues the conversation about the image. Its content is plain text, because it has no image.
    console.page.insert_text("Are you sure?").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the second answer", "conversation.length === 4");
    assert_eq!(console.text("conversation[2].content"), "Are you sure?");
    console.assert_well_behaved(&[]);
}

#[test]
fn a_router_whose_model_reads_no_images_says_so_and_keeps_the_question() {
    let scene = Scene::new(&SIM, &[]);
    let console = scene.console();
    let choose = r"(() => {
        const chosen = new DataTransfer();
        chosen.items.add(new File(['x'], 'x.png', {type: 'image/png'}));
        document.querySelector('#images').files = chosen.files;
        document.querySelector('#prompt').focus();
    })()";
    console.page.evaluate(choose).unwrap();
    console.page.insert_text("What is this?").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the error", "says('note').includes('does not support images')");
    assert_eq!(console.text("document.querySelector('#prompt').value"), "What is this?");
    assert_eq!(console.text("String(document.querySelector('#images').files.length)"), "1");
    assert_eq!(console.text("JSON.stringify(conversation)"), "[]");
}

#[test]
fn a_response_can_be_stopped_and_a_new_conversation_started() {
    let scene = Scene::new(&SLOW, &[]);
    let console = scene.console();
    console.page.evaluate("document.querySelector('#prompt').focus()").unwrap();
    console.page.insert_text("Count").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the answer to begin", "answer().length > 0");
    console.await_expression("the request to be in flight", "says('in-flight') === '1'");
    console.tab_to("stop");
    console.press(&[Key::Enter]);
    console.await_expression("the end", "says('note') === 'Stopped'");
    console.await_expression("no request to be in flight", "says('in-flight') === '0'");
    assert_eq!(console.focused(), "prompt");
    console.page.insert_text("Count on").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the second answer to begin", "answer() && conversation.length === 3");
    console.press(&[Key::Tab, Key::Tab]);
    assert_eq!(console.focused(), "clear");
    console.press(&[Key::Enter]);
    console.await_expression("no request to be in flight", "says('in-flight') === '0'");
    assert_eq!(console.text("says('chat')"), "");
    // The new conversation contains no messages of the previous one.
    console.page.insert_text("Count again").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the answer to begin", "answer().length > 0");
    assert_eq!(console.text("JSON.stringify(conversation)"), r#"[{"role":"user","content":"Count again"}]"#);
    console.assert_well_behaved(&[]);
}

#[test]
fn a_router_with_api_keys_requires_one_for_the_console() {
    const REFUSED: &str = "status of 401";
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys");
    std::fs::write(&keys, "opensesame alice\n").unwrap();
    let scene = Scene::new(&SIM, &[format!("--api-keys={}", keys.display())]);
    let console = scene.bare_console();
    let status = |text: &str| format!("says('status').includes('{text}')");
    console.await_expression("the prompt for a key", &status("requires an API key"));
    console.screenshot("key").unwrap();
    assert_eq!(console.text("says('replicas')"), "");
    assert_eq!(console.focused(), "key");
    console.page.insert_text("sesame").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the message about an invalid key", &status("is invalid"));
    console.page.insert_text("schlüssel").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the message about a malformed key", &status("ASCII"));
    console.page.evaluate("document.querySelector('#key').select()").unwrap();
    console.page.insert_text(" opensesame\t").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the fleet", "all(replica => replica.State === 'serving')");
    console.await_expression(
        "the way to the chat",
        "focused() === 'prompt' && document.querySelector('#access').hidden",
    );
    console.page.insert_text("Hello").unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("the answer", "says('note').startsWith('The text of the answer began after')");
    // The key is not stored beyond the lifetime of the page, and does not appear in a URL.
    let kept =
        "document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + location.href";
    assert!(!console.text(kept).contains("opensesame"));
    assert!(!console.page.requests().iter().any(|url| url.contains("opensesame")));
    console.assert_well_behaved(&[REFUSED, REFUSED]);

    // Revoke the key.
    std::fs::write(&keys, "abracadabra alice\n").unwrap();
    console.await_expression("the prompt for another key", &status("is invalid"));
    console.assert_well_behaved(&[REFUSED, REFUSED, REFUSED]);
}

#[test]
fn a_hanging_router_is_reported_with_the_time_of_the_last_update() {
    let scene = Scene::new(&SIM, &[]);
    let console = scene.console();
    scene.router.process().signal("STOP").unwrap();
    let message = r"/^The router is unreachable; the last update was at \d\d:\d\d:\d\d$/
        .test(says('status'))";
    console.await_expression("the message about the router", message);
    scene.router.process().signal("CONT").unwrap();
    console.await_expression("the page to be live again", "says('status') === 'Live'");
    console.assert_well_behaved(&[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_fits_a_phone_has_enough_contrast_and_names_all_controls() {
    let mut scene = Scene::new(&SIM, &[]);
    let traffic = scene.traffic();
    let gone = scene.servers.swap_remove(0);
    let console = scene.console();
    console.await_expression("both replicas to be busy", "all(replica => count(replica.Running) > 0)");
    // Show one ready and one failed replica, and a response, so that all colors are visible.
    drop(gone);
    console.await_expression("one replica to be unreachable", "says('serving') === '1 of 2'");
    console.page.evaluate("document.querySelector('#prompt').focus()").unwrap();
    // Long words and runs of spaces must wrap, too.
    let prompt = format!("How do you{:200}look? {}", "", "o".repeat(200));
    console.page.insert_text(&prompt).unwrap();
    console.press(&[Key::Enter]);
    console.await_expression("an answer", "answer().length > 100");
    for scheme in ["light", "dark"] {
        console.page.set_color_scheme(scheme).unwrap();
        for (width, height) in [(1280, 800), (820, 1180), (390, 844), (320, 568)] {
            console.page.resize(width, height).unwrap();
            console.screenshot(&format!("{scheme}-{width}")).unwrap();
            let what = format!("{scheme}, {width} wide");
            let beyond = console.page.evaluate(BEYOND).unwrap();
            assert_eq!(beyond, Value::Array(vec![]), "beyond the edge: {what}");
            let faint = format!("({FAINT})({CONTRAST_MIN})");
            let faint = console.page.evaluate(&faint).unwrap();
            assert_eq!(faint, Value::Array(vec![]), "hard to read: {what}");
        }
        assert_eq!(console.page.evaluate(IS_DARK).unwrap(), scheme == "dark");
    }
    drop(traffic.stop().await);
    focus_is_seen_everywhere(&console);
    for control in console.page.controls().unwrap() {
        let is_page = control.role == "RootWebArea";
        assert!(is_page || !control.name.is_empty(), "{control:?} has no name");
    }
    console.assert_well_behaved(&[]);
}

/// Checks that the Tab key reaches the main controls and sections, and that each has a visible ring while it is
/// focused.
fn focus_is_seen_everywhere(console: &Console<'_>) {
    console.page.evaluate("document.activeElement.blur(), window.scrollTo(0, 0)").unwrap();
    let ring = "(style => `${style.outlineStyle} ${parseFloat(style.outlineWidth) >= 2}`)
        (getComputedStyle(document.activeElement))";
    let mut rings = BTreeMap::new();
    for _ in 0..30 {
        console.press(&[Key::Tab]);
        rings.insert(console.focused(), console.text(ring));
    }
    for id in ["skip", "pause", "replicas-title", "picks-title", "chat", "model", "prompt", "send", "clear"] {
        assert_eq!(rings.get(id).map(String::as_str), Some("solid true"), "{id}: {rings:?}");
    }
}

/// Whether the page is dark.
const IS_DARK: &str =
    "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every(part => part < 60)";

/// Finds elements that extend beyond the right edge of the page and are not inside a scrolling element.
const BEYOND: &str = "[document.documentElement, ...document.body.querySelectorAll('*')].filter(node => {
    if (node === document.documentElement) return node.scrollWidth > innerWidth;
    const box = node.getBoundingClientRect();
    return box.width && box.right > innerWidth + 1 && !node.closest('.scroll') && node.checkVisibility();
}).map(node => node.outerHTML.slice(0, 80))";

/// A function that returns the texts whose contrast is less than its argument, with their contrasts.
const FAINT: &str = "least => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const parts = color => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const ground = node => {
        const color = parts(getComputedStyle(node).backgroundColor);
        return color[3] === 255 || !node.parentElement ? color : ground(node.parentElement);
    };
    const light = color => color.slice(0, 3).map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const hasText = node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    const texts = [...document.body.querySelectorAll('*')].filter(node => hasText(node) && node.checkVisibility()
        && !node.disabled && !node.matches('script, .visually-hidden, .skip'));
    if (texts.length < 20) throw new Error('there is hardly any text');
    return texts.map(node => {
        const [a, b] = [light(parts(getComputedStyle(node).color)), light(ground(node))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent];
    }).filter(([ratio]) => ratio < least);
}";
