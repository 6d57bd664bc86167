//! A headless Chromium that shows a page to a test: what it reads, which keys it presses, what it sees. Driven over
//! the browser's DevTools protocol through two pipes: no port, no driver program, no client library. It knows
//! nothing of the pages that it shows.

mod pipe;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use crate::process::{await_condition, group_exists, kill};
use pipe::Pipe;

/// How long anything may take that is waited for, on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// How long the processes of a browser that was killed may take to be gone.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Pages narrower than this are on a phone.
const PHONE_WIDTH: u32 = 600;
/// By which names browsers go that understand this, the first that is there is used.
const NAMES: [&str; 5] =
    ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome-headless-shell"];
/// Set to the path of a browser that goes by another name.
const VARIABLE: &str = "CHROMIUM";
/// What a browser is told that shows pages of this machine and has nothing to do with anybody else.
const FLAGS: [&str; 18] = [
    "--headless",
    // What it shows is ours. In containers and as root there is no sandbox to be had.
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-quic",
    "--disable-gpu",
    "--disable-breakpad",
    // /dev/shm is small in containers.
    "--disable-dev-shm-usage",
    // All timers of a page run, seen or not.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    // Whatever it may want of the network does not exist.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
];

/// A browser. Dropping it ends it with all it has started, and removes what it has written.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    pipe: Pipe,
    folder: tempfile::TempDir,
}

/// A page of a browser, with storage and cookies of its own. It lives as long as the browser.
#[derive(Debug)]
pub struct Page<'a> {
    browser: &'a Browser,
    session: String,
}

/// A key that is not a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// To the next control.
    Tab,
    /// To the one before.
    ShiftTab,
    /// Sends, presses.
    Enter,
    /// Begins a line.
    ShiftEnter,
}

impl Browser {
    /// Starts the browser of this machine.
    ///
    /// # Errors
    /// There is none, or it does not come up within [`LIMIT`].
    pub fn start() -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let program = program()?;
        let folder = tempfile::Builder::new().prefix("browser").tempdir()?;
        let errors = File::create(folder.path().join("errors"))?;
        // It reads from its third file and writes to its fourth; a child has three by itself.
        let mut child = Command::new("bash")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >&2", "browser"])
            .arg(&program)
            .args(FLAGS)
            .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
            .env("HOME", folder.path())
            .env_remove("DISPLAY")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context("failed to run bash")?;
        let input = child.stdin.take().context("the browser has an input")?;
        let output: ChildStdout = child.stdout.take().context("the browser has an output")?;
        let browser = Self { child, pipe: Pipe::new(input, output), folder };
        browser
            .pipe
            .call(None, "Browser.getVersion", json!({}))
            .with_context(|| format!("{} does not come up: {}", program.display(), browser.errors()))?;
        Ok(browser)
    }

    /// Opens `url` and waits until it is there with all it consists of.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(&self, url: &str) -> anyhow::Result<Page<'_>> {
        let context = self.pipe.call(None, "Target.createBrowserContext", json!({}))?;
        let target = self.pipe.call(
            None,
            "Target.createTarget",
            json!({"url": "about:blank", "browserContextId": context["browserContextId"]}),
        )?;
        let attached = self.pipe.call(
            None,
            "Target.attachToTarget",
            json!({"targetId": target["targetId"], "flatten": true}),
        )?;
        let session = attached["sessionId"].as_str().context("a page has a session")?.to_owned();
        let page = Page { browser: self, session };
        for domain in ["Page", "Runtime", "Log", "Network"] {
            page.call(&format!("{domain}.enable"), json!({}))?;
        }
        // As if it were in front of somebody: without, it would show no focus.
        page.call("Emulation.setFocusEmulationEnabled", json!({"enabled": true}))?;
        let answer = page.call("Page.navigate", json!({"url": url}))?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("failed to open {url}: {error}");
        }
        page.await_that("the page to be there", "document.readyState === 'complete'")?;
        Ok(page)
    }

    /// What it has complained about.
    fn errors(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("errors")).unwrap_or_default()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The group still has this number as long as the child has not been waited for.
        let group = self.child.id();
        drop(kill("KILL", &format!("-{group}")));
        drop(self.child.wait());
        // Else it could write while its folder is removed. What nobody has waited for may stay listed.
        drop(await_condition("the browser to be gone", END_LIMIT, || (!group_exists(group)).then_some(())));
    }
}

impl Page<'_> {
    /// What `expression`, JavaScript in the page, gives. If that is a promise, what it comes to.
    ///
    /// # Errors
    /// It throws.
    pub fn evaluate(&self, expression: &str) -> anyhow::Result<Value> {
        let mut answer = self.call(
            "Runtime.evaluate",
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true}),
        )?;
        if let Some(details) = answer.get("exceptionDetails") {
            let text = details["exception"]["description"].as_str().or_else(|| details["text"].as_str());
            bail!("{expression}: {}", text.unwrap_or("it failed"));
        }
        Ok(answer["result"]["value"].take())
    }

    /// What `expression` gives, as text; nothing if it is none.
    ///
    /// # Errors
    /// As [`Page::evaluate`].
    pub fn text(&self, expression: &str) -> anyhow::Result<String> {
        Ok(self.evaluate(expression)?.as_str().unwrap_or_default().to_owned())
    }

    /// Waits until `expression` holds in the page.
    ///
    /// # Errors
    /// It does not within [`LIMIT`], or throws. What the page shows then is told.
    pub fn await_that(&self, what: &str, expression: &str) -> anyhow::Result<()> {
        let expression = format!("Boolean({expression})");
        let held = await_condition(what, LIMIT, || match self.evaluate(&expression) {
            Ok(holds) => (holds == true).then_some(Ok(())),
            Err(error) => Some(Err(error)),
        });
        held.and_then(|held| held).with_context(|| {
            format!("the page shows:\n{}", self.text("document.body.innerText").unwrap_or_default())
        })
    }

    /// Presses and releases a key.
    ///
    /// # Errors
    /// The browser is gone.
    pub fn press(&self, key: Key) -> anyhow::Result<()> {
        let (name, code, text) = match key {
            Key::Tab | Key::ShiftTab => ("Tab", 9, None),
            Key::Enter | Key::ShiftEnter => ("Enter", 13, Some("\r")),
        };
        let shift = if matches!(key, Key::ShiftTab | Key::ShiftEnter) { 8 } else { 0 };
        let mut event = json!({
            "type": if text.is_some() { "keyDown" } else { "rawKeyDown" },
            "key": name,
            "code": name,
            "windowsVirtualKeyCode": code,
            "nativeVirtualKeyCode": code,
            "modifiers": shift,
        });
        if let Some(text) = text {
            event["text"] = json!(text);
        }
        self.call("Input.dispatchKeyEvent", event.clone())?;
        event["type"] = json!("keyUp");
        self.call("Input.dispatchKeyEvent", event)?;
        Ok(())
    }

    /// Types `text` into what has the focus.
    ///
    /// # Errors
    /// The browser is gone.
    pub fn write(&self, text: &str) -> anyhow::Result<()> {
        self.call("Input.insertText", json!({"text": text})).map(drop)
    }

    /// Makes the page as large as this, in CSS pixels.
    ///
    /// # Errors
    /// The browser is gone.
    pub fn resize(&self, width: u32, height: u32) -> anyhow::Result<()> {
        self.call(
            "Emulation.setDeviceMetricsOverride",
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < PHONE_WIDTH}),
        )
        .map(drop)
    }

    /// Lets the page know which colours its reader likes: "light" or "dark".
    ///
    /// # Errors
    /// The browser is gone.
    pub fn prefer(&self, scheme: &str) -> anyhow::Result<()> {
        self.call(
            "Emulation.setEmulatedMedia",
            json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
        )
        .map(drop)
    }

    /// The names and roles of what is told to those who do not see the page, of what can be operated.
    ///
    /// # Errors
    /// The browser is gone.
    pub fn controls(&self) -> anyhow::Result<Vec<Control>> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}))?;
        let nodes = tree["nodes"].as_array().context("the page has a tree of what it tells")?;
        let is_control = |node: &&Value| {
            node["properties"].as_array().is_some_and(|properties| {
                properties.iter().any(|one| one["name"] == "focusable" && one["value"]["value"] == true)
            })
        };
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        let controls = nodes.iter().filter(is_control);
        Ok(controls.map(|node| Control { role: text(&node["role"]), name: text(&node["name"]) }).collect())
    }

    /// Writes a picture of the whole page to `folder` and gives its path.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn picture(&self, folder: &Path, name: &str) -> anyhow::Result<PathBuf> {
        let size = &self.call("Page.getLayoutMetrics", json!({}))?["cssContentSize"];
        let clip = json!({"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1});
        let answer = self.call(
            "Page.captureScreenshot",
            json!({"format": "png", "clip": clip, "captureBeyondViewport": true}),
        )?;
        let bytes = base64(answer["data"].as_str().unwrap_or_default()).context("a picture is base64")?;
        let path = folder.join(format!("{name}.png"));
        std::fs::write(&path, bytes).with_context(|| format!("failed to write {}", path.display()))?;
        Ok(path)
    }

    /// What the page and the browser have complained about: exceptions, errors and warnings in the console.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let complaint = |event: &Value| {
            let params = &event["params"];
            match event["method"].as_str()? {
                "Runtime.exceptionThrown" => Some(params["exceptionDetails"].to_string()),
                "Runtime.consoleAPICalled" => Some(params["args"].to_string()),
                "Log.entryAdded" if params["entry"]["level"] == "verbose" => None,
                "Log.entryAdded" => {
                    let entry = &params["entry"];
                    let part = |name: &str| entry[name].as_str().unwrap_or_default();
                    Some(format!("{} {}", part("text"), part("url")))
                }
                _ => None,
            }
        };
        self.browser.pipe.events(&self.session).iter().filter_map(complaint).collect()
    }

    /// Where the page, and the browser on its behalf, has sent requests to.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        let url = |event: &Value| match event["method"].as_str()? {
            "Network.requestWillBeSent" => event["params"]["request"]["url"].as_str().map(str::to_owned),
            "Network.webSocketCreated" => event["params"]["url"].as_str().map(str::to_owned),
            _ => None,
        };
        self.browser.pipe.events(&self.session).iter().filter_map(url).collect()
    }

    fn call(&self, method: &str, params: Value) -> anyhow::Result<Value> {
        self.browser.pipe.call(Some(&self.session), method, params)
    }
}

/// Something that can have the focus, as it is told to those who do not see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// What it is.
    pub role: String,
    /// What it is called.
    pub name: String,
}

/// The browser of this machine.
fn program() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE) {
        return Ok(path.into());
    }
    let folders: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    let mut candidates = NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    candidates.find(|path| path.is_file()).with_context(|| {
        format!(
            "there is no Chromium on PATH: install it (Debian: apt-get install chromium) or set {VARIABLE}"
        )
    })
}

/// The bytes of a text in base64, if it is one.
fn base64(text: &str) -> Option<Vec<u8>> {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut gathered, mut bits) = (0_u32, 0);
    for letter in text.trim_end_matches('=').bytes() {
        let value = LETTERS.iter().position(|&known| known == letter)?;
        gathered = gathered << 6 | value as u32;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((gathered >> bits) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_read_whatever_its_length() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg==", "foob")]
        {
            assert_eq!(base64(text).as_deref(), Some(bytes.as_bytes()));
        }
        assert_eq!(base64("a b"), None);
    }
}
