//! A headless Chromium that a test drives over the DevTools protocol. The messages of the protocol are sent over two
//! pipes, so a test needs no port, no driver program and no client library. This module is independent of the pages
//! that it opens.

mod pipe;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use crate::process::{await_condition, group_exists, kill};
pub use pipe::LIMIT;
use pipe::Pipe;

/// The time limit for the processes of a killed browser to exit.
const END_LIMIT: Duration = Duration::from_secs(5);
/// The width in CSS pixels below which pages are displayed as on a phone.
const PHONE_WIDTH: u32 = 600;
/// The program names of compatible browsers; the first one on `PATH` is used.
const NAMES: [&str; 5] =
    ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome-headless-shell"];
/// The environment variable for the path of a browser with another name.
const VARIABLE: &str = "CHROMIUM";
/// The flags of a browser that opens only pages of this machine and sends no data to other machines.
const FLAGS: [&str; 18] = [
    "--headless",
    // The sandbox works neither in containers nor as root, and the pages are trusted.
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
    // Without these flags, the browser throttles timers in pages that are not visible.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    // No host name resolves, so the browser reaches only this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
];

/// A browser. Dropping it kills its processes and removes its files.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    pipe: Pipe,
    directory: tempfile::TempDir,
}

/// A page of a browser, with its own storage and cookies. It remains open until the browser exits.
#[derive(Debug)]
pub struct Page<'a> {
    browser: &'a Browser,
    session: String,
}

/// A key, or a combination of keys, that does not type a visible character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Moves the focus to the next control.
    Tab,
    /// Moves the focus to the previous control.
    ShiftTab,
    /// Activates a control or sends a message.
    Enter,
    /// Starts a new line in a text field.
    ShiftEnter,
}

impl Browser {
    /// Starts the installed browser.
    ///
    /// # Errors
    /// No browser is installed, or the browser does not respond within [`LIMIT`].
    pub fn start() -> anyhow::Result<Self> {
        use std::os::unix::process::CommandExt as _;
        let program = program()?;
        let directory = tempfile::Builder::new().prefix("browser").tempdir()?;
        let errors = File::create(directory.path().join("errors"))?;
        // Chromium reads from file descriptor 3 and writes to 4, but `Command` sets only 0 to 2.
        let mut child = Command::new("bash")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >&2", "browser"])
            .arg(&program)
            .args(FLAGS)
            .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
            .env("HOME", directory.path())
            .env_remove("DISPLAY")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context("failed to run bash")?;
        let input = child.stdin.take().context("the browser has no standard input")?;
        let output: ChildStdout = child.stdout.take().context("the browser has no standard output")?;
        let browser = Self { child, pipe: Pipe::new(input, output), directory };
        browser
            .pipe
            .call(None, "Browser.getVersion", json!({}))
            .with_context(|| format!("{} does not respond: {}", program.display(), browser.errors()))?;
        Ok(browser)
    }

    /// Opens `url` and waits until the page and its resources are loaded.
    ///
    /// # Errors
    /// The page cannot be loaded.
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
        let session = attached["sessionId"].as_str().context("the page has no session")?.to_owned();
        let page = Page { browser: self, session };
        for domain in ["Page", "Runtime", "Log", "Network"] {
            page.call(&format!("{domain}.enable"), json!({}))?;
        }
        // Otherwise, a page in the background does not show the focus.
        page.call("Emulation.setFocusEmulationEnabled", json!({"enabled": true}))?;
        let answer = page.call("Page.navigate", json!({"url": url}))?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("failed to open {url}: {error}");
        }
        page.await_expression("the page to load", "document.readyState === 'complete'")?;
        Ok(page)
    }

    /// The text that the browser has written to its standard error.
    fn errors(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("errors")).unwrap_or_default()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The ID of the process group cannot be reused until the child is reaped, so the signal cannot reach another
        // group.
        let group = self.child.id();
        drop(kill("KILL", &format!("-{group}")));
        drop(self.child.wait());
        // A process that is still running could write to the directory while it is removed. The wait may time out,
        // because zombies belong to the group, too.
        drop(await_condition("the browser to exit", END_LIMIT, || (!group_exists(group)).then_some(())));
    }
}

impl Page<'_> {
    /// Evaluates the JavaScript `expression` in the page. If the result is a promise, awaits it.
    ///
    /// # Errors
    /// The expression throws.
    pub fn evaluate(&self, expression: &str) -> anyhow::Result<Value> {
        let mut answer = self.call(
            "Runtime.evaluate",
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true}),
        )?;
        if let Some(details) = answer.get("exceptionDetails") {
            let text = details["exception"]["description"].as_str().or_else(|| details["text"].as_str());
            bail!("{expression}: {}", text.unwrap_or("an exception without a description"));
        }
        Ok(answer["result"]["value"].take())
    }

    /// Evaluates `expression` to a string. A value of another type becomes an empty string.
    ///
    /// # Errors
    /// Returns the same errors as [`Page::evaluate`].
    pub fn text(&self, expression: &str) -> anyhow::Result<String> {
        Ok(self.evaluate(expression)?.as_str().unwrap_or_default().to_owned())
    }

    /// Waits until `expression` is true in the page.
    ///
    /// # Errors
    /// The expression throws or is not true within [`LIMIT`]. The error contains the text of the page.
    pub fn await_expression(&self, what: &str, expression: &str) -> anyhow::Result<()> {
        let expression = format!("Boolean({expression})");
        let result = await_condition(what, LIMIT, || match self.evaluate(&expression) {
            Ok(value) => (value == true).then_some(Ok(())),
            Err(error) => Some(Err(error)),
        });
        result.and_then(|result| result).with_context(|| {
            format!("the page shows:\n{}", self.text("document.body.innerText").unwrap_or_default())
        })
    }

    /// Presses and releases a key.
    ///
    /// # Errors
    /// The browser does not respond.
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

    /// Inserts `text` into the focused element.
    ///
    /// # Errors
    /// The browser does not respond.
    pub fn insert_text(&self, text: &str) -> anyhow::Result<()> {
        self.call("Input.insertText", json!({"text": text})).map(drop)
    }

    /// Sets the size of the page, in CSS pixels.
    ///
    /// # Errors
    /// The browser does not respond.
    pub fn resize(&self, width: u32, height: u32) -> anyhow::Result<()> {
        self.call(
            "Emulation.setDeviceMetricsOverride",
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < PHONE_WIDTH}),
        )
        .map(drop)
    }

    /// Sets the preferred color scheme of the reader: "light" or "dark".
    ///
    /// # Errors
    /// The browser does not respond.
    pub fn set_color_scheme(&self, scheme: &str) -> anyhow::Result<()> {
        self.call(
            "Emulation.setEmulatedMedia",
            json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
        )
        .map(drop)
    }

    /// The focusable controls in the accessibility tree of the page.
    ///
    /// # Errors
    /// The browser does not respond.
    pub fn controls(&self) -> anyhow::Result<Vec<Control>> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}))?;
        let nodes = tree["nodes"].as_array().context("the page has no accessibility tree")?;
        let is_control = |node: &&Value| {
            node["properties"].as_array().is_some_and(|properties| {
                properties.iter().any(|one| one["name"] == "focusable" && one["value"]["value"] == true)
            })
        };
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        let controls = nodes.iter().filter(is_control);
        Ok(controls.map(|node| Control { role: text(&node["role"]), name: text(&node["name"]) }).collect())
    }

    /// Writes a screenshot of the whole page to `directory` and returns its path.
    ///
    /// # Errors
    /// The browser does not respond, or the file cannot be written.
    pub fn screenshot(&self, directory: &Path, name: &str) -> anyhow::Result<PathBuf> {
        let size = &self.call("Page.getLayoutMetrics", json!({}))?["cssContentSize"];
        let clip = json!({"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1});
        let answer = self.call(
            "Page.captureScreenshot",
            json!({"format": "png", "clip": clip, "captureBeyondViewport": true}),
        )?;
        let bytes = base64(answer["data"].as_str().unwrap_or_default())
            .context("the screenshot is not valid base64")?;
        let path = directory.join(format!("{name}.png"));
        std::fs::write(&path, bytes).with_context(|| format!("failed to write {}", path.display()))?;
        Ok(path)
    }

    /// The exceptions, and the messages that the page and the browser have logged to the console, except for verbose
    /// messages of the browser.
    #[must_use]
    pub fn console_messages(&self) -> Vec<String> {
        let message = |event: &Value| {
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
        self.browser.pipe.events(&self.session).iter().filter_map(message).collect()
    }

    /// The URLs of the requests that the page, or the browser on its behalf, has sent.
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

/// A focusable element, as assistive technology presents it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// The ARIA role of the element.
    pub role: String,
    /// The accessible name of the element.
    pub name: String,
}

/// The path of the browser that is installed on this machine.
fn program() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE) {
        return Ok(path.into());
    }
    let directories: Vec<PathBuf> =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    let mut candidates =
        NAMES.iter().flat_map(|name| directories.iter().map(move |directory| directory.join(name)));
    candidates.find(|path| path.is_file()).with_context(|| {
        format!("no Chromium found on PATH: install it (Debian: apt-get install chromium) or set {VARIABLE}")
    })
}

/// Decodes `text`; returns `None` if it is not valid base64.
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
