//! Tests images that requests refer to by URL or path.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::harness::{Server, command, rest};

const IMAGE: &[u8] = include_bytes!("../../images/tests/reference/files/rgb.png");

/// Starts a web server that serves one image, `/image.png`, until the test process exits.
fn web_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            let line = lines.next().unwrap_or_default();
            while lines.next().is_some_and(|line| !line.is_empty()) {}
            let (status, body) = if line.contains(" /image.png ") {
                ("200 OK", IMAGE)
            } else {
                ("404 Not Found", &b"secret"[..])
            };
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        }
    });
    address
}

/// Sends a chat request with these images. Returns the status and the body of the answer.
fn chat(server: &Server, images: &[&str]) -> (u16, Value) {
    let images = images.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    let text = json!({"type": "text", "text": "What is this?"});
    let content: Vec<Value> = images.chain([text]).collect();
    let body = json!({
        "model": "sim", "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": content}],
    })
    .to_string();
    let mut stream = server.connect();
    let length = body.len();
    let head = "POST /v3/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close";
    write!(stream, "{head}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    let answer = rest(stream);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), serde_json::from_str(body).unwrap())
}

/// Returns the error message for an image that the server rejects.
fn refusal(server: &Server, image: &str) -> String {
    let (status, body) = chat(server, &[image]);
    let error = &body["error"];
    assert_eq!((status, &error["code"]), (400, &json!("invalid_image_url")), "{image}: {body}");
    assert_eq!(error["param"], "messages[0].content[0].image_url", "{image}: {body}");
    error["message"].as_str().unwrap().to_owned()
}

/// Returns an uncompressed square BMP image with 24 bits per pixel. `side` is in pixels and must be a multiple of four.
fn bitmap(side: u32) -> Vec<u8> {
    let (head, pixels) = (54, side * side * 3);
    let mut file = b"BM".to_vec();
    for number in [head + pixels, 0, head, 40, side, side, 1 | 24 << 16, 0, pixels, 0, 0, 0, 0] {
        file.extend(number.to_le_bytes());
    }
    file.resize((head + pixels) as usize, 127);
    file
}

#[test]
fn an_image_of_nearly_the_largest_size_fits_into_a_request_by_default() {
    let server = Server::start(&mut command(&["--sim-images"]));
    let image = bitmap(2600);
    assert!(image.len() > 19 << 20, "the limit is 20 MiB");
    let url = format!("data:image/bmp;base64,{}", BASE64_STANDARD.encode(image));
    let (status, body) = chat(&server, &[&url]);
    assert_eq!(status, 200, "{body}");
}

#[test]
fn images_are_fetched_from_allowed_places() {
    let web = web_server();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("image.png");
    std::fs::write(&file, IMAGE).unwrap();
    std::fs::write(directory.path().join("text.png"), "no image").unwrap();
    let mut command = command(&[
        "--sim-images",
        "--allowed-media-domains",
        &format!("{web},localhost"),
        "--allowed-media-networks=127.0.0.1/32",
        "--allowed-local-media-path",
        directory.path().to_str().unwrap(),
    ]);
    // The server must ignore this proxy, because a proxy would resolve names itself. Requests through the proxy would
    // fail, because nothing listens on the proxy's address.
    let server = Server::start(command.env("http_proxy", "http://127.0.0.2:9"));
    let url = format!("http://{web}/image.png");
    let path = file.to_str().unwrap();
    let file_url = format!("file://{path}");
    let (status, without) = chat(&server, &[]);
    assert_eq!(status, 200, "{without}");
    let answers = [&url[..], path, &file_url].map(|image| chat(&server, &[image]));
    for (status, body) in &answers {
        assert_eq!(*status, 200, "{body}");
        assert_eq!(body["choices"], answers[0].1["choices"]);
        let tokens = |body: &Value| body["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(tokens(body) >= tokens(&without) + 16, "{body} {without}");
    }
    let (status, body) = chat(&server, &[&url, path, &url, &file_url]);
    assert_eq!(status, 200, "{body}");

    let missing = refusal(&server, &format!("http://{web}/other.png"));
    assert!(missing.ends_with("the host \"127.0.0.1\" answered with status 404"), "{missing}");
    for (image, reason) in [
        ("http://example.com/a.png", "--allowed-media-domains"),
        ("http://127.0.0.2/a.png", "--allowed-media-domains"),
        ("/etc/passwd", "--allowed-local-media-path"),
        ("a.png", "neither a supported URL nor an absolute path"),
    ] {
        let message = refusal(&server, image);
        assert!(message.contains(reason), "{image}: {message}");
    }
    // The content of the file is not an image.
    let text = directory.path().join("text.png");
    assert_eq!(chat(&server, &[text.to_str().unwrap()]).0, 400);
}

#[test]
fn images_are_not_fetched_by_default() {
    let web = web_server();
    let server = Server::start(&mut command(&["--sim-images"]));
    let message = refusal(&server, &format!("http://{web}/image.png"));
    assert!(message.contains("--allowed-media-domains"), "{message}");
    for path in ["/etc/passwd", "file:///etc/passwd"] {
        let message = refusal(&server, path);
        assert!(message.contains("--allowed-local-media-path"), "{message}");
    }
}

#[test]
fn a_directory_that_does_not_exist_is_reported_at_the_start() {
    let path = tempfile::tempdir().unwrap().path().join("missing");
    let said = crate::refusal(&mut command(&["--allowed-local-media-path", path.to_str().unwrap()]));
    assert!(said.contains("failed to open --allowed-local-media-path"), "{said}");
}
