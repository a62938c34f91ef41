//! Headless Chromium, driven through its driver by the WebDriver protocol: JSON over plain HTTP, so a socket
//! is enough.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// After this long without what was waited for, something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A browser with one page.
pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
    profile: PathBuf,
}

/// The first of these programs that is on the search path.
fn program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).flat_map(|dir| names.iter().map(move |name| dir.join(name)));
    found.into_iter().find(|file| file.is_file())
}

impl Browser {
    /// Starts a browser, or says why the test is skipped.
    pub fn start(name: &str, width: u32, height: u32) -> Option<Browser> {
        let chromium = program(&["chromium", "chromium-browser", "google-chrome"]);
        let (Some(chromium), Some(driver)) = (chromium, program(&["chromedriver"])) else {
            println!(
                "skipped: Chromium and its driver are not installed (Debian: chromium, chromium-driver)"
            );
            return None;
        };
        let profile =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("profile-{name}-{}", std::process::id()));
        let mut driver = Command::new(driver)
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the driver starts");
        let mut lines = BufReader::new(driver.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
        let port = lines
            .find_map(|line| line.split("successfully on port ").nth(1)?.trim_end_matches('.').parse().ok());
        let port = port.expect("the driver names its port");
        std::thread::spawn(move || lines.count()); // the driver must not block on a full pipe
        let mut browser = Browser { driver, port, session: String::new(), profile };
        let mut flags: Vec<String> = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
        ]
        .map(str::to_string)
        .into();
        flags.push(format!("--window-size={width},{height}"));
        flags.push(format!("--user-data-dir={}", browser.profile.display()));
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"binary": chromium, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let begun = browser.call("POST", "/session", &wanted);
        browser.session =
            begun["sessionId"].as_str().unwrap_or_else(|| panic!("no session: {begun}")).to_string();
        Some(browser)
    }

    /// One call of the protocol; its value.
    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = body.to_string();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the driver listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost:{}\r\nContent-Type: application/json",
            self.port
        );
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).expect("sent");
        let mut reader = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).expect("a header");
            if line.trim().is_empty() {
                break;
            }
            if let Some((name, value)) =
                line.split_once(':').filter(|(n, _)| n.eq_ignore_ascii_case("content-length"))
            {
                length = value.trim().parse().unwrap_or_else(|_| panic!("{name}: {value}"));
            }
        }
        let mut answer = vec![0; length];
        reader.read_exact(&mut answer).expect("the answer");
        let answer: Value = serde_json::from_slice(&answer).expect("JSON");
        assert!(answer["value"]["error"].is_null(), "{method} {path}: {}", answer["value"]);
        answer["value"].clone()
    }

    fn ask(&self, what: &str, body: &Value) -> Value {
        self.call("POST", &format!("/session/{}/{what}", self.session), body)
    }

    /// Opens an address and waits until the page is drawn.
    pub fn open(&self, url: &str) {
        self.ask("url", &json!({"url": url}));
        self.wait_for("return document.documentElement.dataset.ready === 'yes'");
    }

    /// The value of a script that ends with `return`.
    pub fn eval(&self, script: &str) -> Value {
        self.ask("execute/sync", &json!({"script": script, "args": []}))
    }

    /// Waits until a script returns true.
    pub fn wait_for(&self, script: &str) {
        let began = Instant::now();
        while self.eval(script) != json!(true) {
            assert!(began.elapsed() < PATIENCE, "never true: {script}; console: {}", self.console());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What the page wrote to its console since the last call: errors, refused loads, violations of its
    /// policy.
    pub fn console(&self) -> Value {
        self.ask("se/log", &json!({"type": "browser"}))
    }

    /// Drags the mouse across an element, from and to these shares of its width.
    pub fn drag(&self, selector: &str, from: f64, to: f64) {
        let at = |share: f64| self.place(selector, share);
        let mut steps = vec![moved(at(from)), json!({"type": "pointerDown", "button": 0})];
        steps.extend((1..=4).map(|i| moved(at(from + (to - from) * f64::from(i) / 4.0))));
        steps.push(json!({"type": "pointerUp", "button": 0}));
        self.mouse(&steps);
    }

    /// Points at an element, at this share of its width.
    pub fn point(&self, selector: &str, share: f64) {
        self.mouse(&[moved(self.place(selector, share))]);
    }

    /// Clicks on the middle of an element as often as this.
    pub fn click(&self, selector: &str, times: usize) {
        let mut steps = vec![moved(self.place(selector, 0.5))];
        for _ in 0..times {
            steps.push(json!({"type": "pointerDown", "button": 0}));
            steps.push(json!({"type": "pointerUp", "button": 0}));
        }
        self.mouse(&steps);
    }

    /// A place in the window, after the element has been brought there.
    fn place(&self, selector: &str, share: f64) -> (i64, i64) {
        let place = self.eval(&format!(
            "const e = document.querySelector({selector:?}); e.scrollIntoView({{ block: 'center' }}); \
             const b = e.getBoundingClientRect(); return [b.left + {share} * b.width, b.top + b.height / 2]"
        ));
        let number =
            |i: usize| place[i].as_f64().unwrap_or_else(|| panic!("{selector}: {place}")).round() as i64;
        (number(0), number(1))
    }

    fn mouse(&self, steps: &[Value]) {
        let kind = json!({"pointerType": "mouse"});
        let mouse = json!({"type": "pointer", "id": "mouse", "parameters": kind, "actions": steps});
        self.ask("actions", &json!({"actions": [mouse]}));
    }

    /// Lets the page save files into a directory.
    pub fn save_to(&self, dir: &Path) {
        let params = json!({"behavior": "allow", "downloadPath": dir});
        self.ask("goog/cdp/execute", &json!({"cmd": "Browser.setDownloadBehavior", "params": params}));
    }

    /// A picture of the window, as PNG.
    pub fn screenshot(&self) -> Vec<u8> {
        let picture = self.call("GET", &format!("/session/{}/screenshot", self.session), &json!({}));
        from_base64(picture.as_str().expect("base64"))
    }

    /// Shows the page as a phone with this many points across does.
    pub fn as_phone(&self, width: u32, height: u32) {
        self.as_screen(width, height, 2, true);
    }

    /// Shows the page in a window with exactly this many points.
    pub fn as_desk(&self, width: u32, height: u32) {
        self.as_screen(width, height, 1, false);
    }

    fn as_screen(&self, width: u32, height: u32, scale: u32, mobile: bool) {
        let screen = json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile});
        self.ask("goog/cdp/execute", &json!({"cmd": "Emulation.setDeviceMetricsOverride", "params": screen}));
    }
}

fn moved((x, y): (i64, i64)) -> Value {
    json!({"type": "pointerMove", "duration": 20, "x": x, "y": y})
}

fn from_base64(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits =
            four.iter().fold(0u32, |bits, &c| bits << 6 | u32::from(digit(c))) << (6 * (4 - four.len()));
        bytes.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    bytes
}

impl Drop for Browser {
    /// Closes the browser through the driver, which would leave it running, and minds no failure: the test
    /// may be failing.
    fn drop(&mut self) {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) {
            let request =
                format!("DELETE /session/{} HTTP/1.1\r\nHost: localhost:{}\r\n\r\n", self.session, self.port);
            _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
            _ = stream.write_all(request.as_bytes());
            _ = stream.read(&mut [0; 1024]);
        }
        _ = self.driver.kill();
        _ = self.driver.wait();
        _ = std::fs::remove_dir_all(&self.profile);
    }
}
