//! A replica's answer as it stands on the wire: its head, and where its body ends. Pure: bytes in, bytes out.
//!
//! Only what is between two neighbours is taken away. Pieces of a body are handed out without being copied, but for
//! small chunks that came together, which are cheaper as one.

use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Response, StatusCode, response};
use memchr::{memchr, memmem};

use crate::proxy::headers;

/// Bytes of a head.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Headers of an answer.
const HEADERS_MAX: usize = 100;
/// Bytes of the line that says how long a chunk is, and of a line behind the last.
const LINE_BYTES_MAX: usize = 4096;

/// This is not how an answer looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer makes no sense: {0}")]
pub(crate) struct Malformed(&'static str);

impl From<Malformed> for std::io::Error {
    fn from(malformed: Malformed) -> Self {
        Self::new(std::io::ErrorKind::InvalidData, malformed)
    }
}

/// What an answer begins with.
#[derive(Debug)]
pub(super) struct Head {
    /// Status and headers, those of the connection left out.
    pub(super) parts: response::Parts,
    pub(super) body: Body,
    /// Whether the connection can carry another request when the answer is over.
    pub(super) keeps: bool,
}

/// What is still to come of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// So many bytes.
    Sized(u64),
    Chunked(Chunk),
    /// Whatever comes before the connection ends.
    UntilClose,
    /// Nothing.
    Ended,
}

/// A place within chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// Before the line with the size.
    Size,
    /// So many bytes before its end.
    Data(u64),
    /// Before the line end behind it.
    End,
    /// Behind the last one.
    Trailer,
}

/// What [`Body::take`] found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    Data(Bytes),
    /// More has to come.
    More,
    /// This was all.
    End,
}

impl Head {
    /// Takes the head off `input`, if all of it is there. `has_body`: the request was not one whose answer is a head
    /// alone.
    ///
    /// # Errors
    /// It is none of HTTP/1.
    pub(super) fn take(input: &mut BytesMut, has_body: bool) -> Result<Option<Self>, Malformed> {
        loop {
            let known = input.len().min(b"HTTP/1.".len());
            if input[..known] != b"HTTP/1."[..known] {
                return Err(Malformed("it is not of HTTP/1"));
            }
            let Some(end) = memmem::find(input, b"\r\n\r\n") else {
                let is_long = input.len() > HEAD_BYTES_MAX;
                return if is_long { Err(Malformed("its head is too long")) } else { Ok(None) };
            };
            let head = parse(&input.split_to(end + 4).freeze(), has_body)?;
            // What goes before the answer is not it.
            match head.parts.status {
                StatusCode::SWITCHING_PROTOCOLS => {
                    return Err(Malformed("nobody asked for another protocol"));
                }
                status if status.is_informational() => {}
                _ => return Ok(Some(head)),
            }
        }
    }
}

fn parse(text: &Bytes, has_body: bool) -> Result<Head, Malformed> {
    let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut fields);
    let status = parsed.parse(text).map_err(|_| Malformed("its head"))?;
    let (httparse::Status::Complete(_), Some(code)) = (status, parsed.code) else {
        return Err(Malformed("its head"));
    };
    let (mut parts, ()) = Response::new(()).into_parts();
    parts.status = StatusCode::from_u16(code).map_err(|_| Malformed("its status"))?;
    parts.headers = HeaderMap::with_capacity(parsed.headers.len() + 2);
    let mut length = None;
    let mut coding = None;
    let mut keeps = parsed.version == Some(1);
    let mut names_more = None;
    for field in parsed.headers.iter() {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| Malformed("a header's name"))?;
        let value = HeaderValue::from_maybe_shared(text.slice_ref(field.value))
            .map_err(|_| Malformed("a header's value"))?;
        if name == header::CONTENT_LENGTH {
            let given = number(field.value)?;
            if length.is_some_and(|known| known != given) {
                return Err(Malformed("it has two lengths"));
            }
            length = Some(given);
            parts.headers.insert(name, value);
        } else if name == header::TRANSFER_ENCODING {
            coding = Some(value);
        } else if name == header::CONNECTION {
            let tokens = || field.value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii);
            keeps &= !tokens().any(|token| token.eq_ignore_ascii_case(b"close"));
            names_more = Some(value);
        } else if !headers::is_hop_by_hop(&name) {
            parts.headers.append(name, value);
        }
    }
    for name in names_more.iter().flat_map(headers::named) {
        parts.headers.remove(name);
    }
    let body = match (coding, length) {
        _ if !has_body || matches!(parts.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) => {
            Body::Ended
        }
        (Some(coding), _) => {
            // It says how long the body is on the wire, which is over here.
            parts.headers.remove(header::CONTENT_LENGTH);
            let last = coding.as_bytes().rsplit(|&byte| byte == b',').next().unwrap_or_default();
            let is_chunked = last.trim_ascii().eq_ignore_ascii_case(b"chunked");
            if is_chunked { Body::Chunked(Chunk::Size) } else { Body::UntilClose }
        }
        (None, Some(0)) => Body::Ended,
        (None, Some(length)) => Body::Sized(length),
        (None, None) => Body::UntilClose,
    };
    Ok(Head { parts, keeps: keeps && body != Body::UntilClose, body })
}

fn number(text: &[u8]) -> Result<u64, Malformed> {
    let is_number = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(text).ok().filter(|_| is_number).and_then(|text| text.parse().ok());
    number.ok_or(Malformed("its length"))
}

impl Body {
    /// Takes what is there of the body off `input`.
    ///
    /// # Errors
    /// What is there does not fit what was said.
    pub(super) fn take(&mut self, input: &mut BytesMut) -> Result<Taken, Malformed> {
        let data = match self {
            Self::Ended => return Ok(Taken::End),
            Self::UntilClose => input.split().freeze(),
            Self::Sized(left) => {
                let data = piece(input, left);
                if *left == 0 {
                    *self = Self::Ended;
                }
                data.freeze()
            }
            Self::Chunked(_) => self.chunks(input)?,
        };
        Ok(match self {
            _ if !data.is_empty() => Taken::Data(data),
            Self::Ended => Taken::End,
            _ => Taken::More,
        })
    }

    /// The connection has ended.
    ///
    /// # Errors
    /// Something is missing.
    pub(super) fn close(&mut self) -> Result<(), Malformed> {
        match self {
            Self::Ended | Self::UntilClose => {
                *self = Self::Ended;
                Ok(())
            }
            Self::Sized(_) | Self::Chunked(_) => Err(Malformed("it ended early")),
        }
    }

    /// The data of all chunks, or parts of chunks, that are there.
    fn chunks(&mut self, input: &mut BytesMut) -> Result<Bytes, Malformed> {
        let mut data = BytesMut::new();
        while let Self::Chunked(chunk) = self {
            match chunk {
                Chunk::Size => {
                    let Some(line) = line(input)? else { break };
                    *chunk = match size(line)? {
                        0 => Chunk::Trailer,
                        size => Chunk::Data(size),
                    };
                    skip_line(input);
                }
                Chunk::Data(_) if input.is_empty() => break,
                Chunk::Data(left) => {
                    let piece = piece(input, left);
                    if *left == 0 {
                        *chunk = Chunk::End;
                    }
                    if data.is_empty() {
                        data = piece;
                    } else {
                        if data.capacity() - data.len() < piece.len() {
                            let mut joined = BytesMut::with_capacity(data.len() + piece.len() + input.len());
                            joined.extend_from_slice(&data);
                            data = joined;
                        }
                        data.extend_from_slice(&piece);
                    }
                }
                Chunk::End | Chunk::Trailer => {
                    let Some(line) = line(input)? else { break };
                    let is_blank = line.is_empty();
                    skip_line(input);
                    match chunk {
                        Chunk::End if is_blank => *chunk = Chunk::Size,
                        Chunk::End => return Err(Malformed("a chunk is longer than was said")),
                        _ if is_blank => *self = Self::Ended,
                        // Nobody is told of trailers.
                        _ => {}
                    }
                }
            }
        }
        Ok(data.freeze())
    }
}

/// Of the `left` bytes those that are there.
fn piece(input: &mut BytesMut, left: &mut u64) -> BytesMut {
    let count = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
    *left -= count as u64;
    input.split_to(count)
}

/// The line that `input` begins with, without its end; `None` if that is not there yet.
fn line(input: &[u8]) -> Result<Option<&[u8]>, Malformed> {
    match memchr(b'\n', &input[..input.len().min(LINE_BYTES_MAX)]) {
        Some(end) => match input[..end].strip_suffix(b"\r") {
            Some(line) => Ok(Some(line)),
            None => Err(Malformed("a line ends oddly")),
        },
        None if input.len() >= LINE_BYTES_MAX => Err(Malformed("a line is too long")),
        None => Ok(None),
    }
}

fn skip_line(input: &mut BytesMut) {
    let end = memchr(b'\n', input).expect("invariant: a line is there");
    input.advance(end + 1);
}

/// The size of a chunk, which extensions may follow.
fn size(line: &[u8]) -> Result<u64, Malformed> {
    const DIGITS_MAX: usize = 15;
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (text, rest) = line.split_at(digits);
    let is_odd = !matches!(rest.trim_ascii().first(), None | Some(b';'));
    if text.is_empty() || digits > DIGITS_MAX || is_odd {
        return Err(Malformed("the size of a chunk"));
    }
    let text = std::str::from_utf8(text).map_err(|_| Malformed("the size of a chunk"))?;
    u64::from_str_radix(text, 16).map_err(|_| Malformed("the size of a chunk"))
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    type Read = Result<(u16, HeaderMap, Vec<u8>, bool), Malformed>;

    /// Reads `text` in two pieces: status, headers, body, and whether it ended by itself.
    fn read(text: &[u8], split: usize) -> Read {
        read_pieces([&text[..split], &text[split..]])
    }

    fn read_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Read {
        let mut input = BytesMut::new();
        let mut head = None;
        let mut body = Vec::new();
        for piece in pieces {
            input.extend_from_slice(piece);
            if head.is_none() {
                head = Head::take(&mut input, true)?;
            }
            if let Some(head) = &mut head {
                while let Taken::Data(bytes) = head.body.take(&mut input)? {
                    body.extend_from_slice(&bytes);
                }
            }
        }
        let head = head.ok_or(Malformed("no head"))?;
        Ok((head.parts.status.as_u16(), head.parts.headers, body, head.body == Body::Ended))
    }

    #[test]
    fn a_body_is_found_however_it_is_framed_and_cut() {
        let cases = [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "hello", true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "", true),
            ("HTTP/1.1 204 No\r\n\r\n", "", true),
            ("HTTP/1.0 200 OK\r\nx: y\r\n\r\nall of it", "all of it", false),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\ncontent-length: 3\r\n\r\n\
                 3;x=\"y\"\r\nhel\r\n02\r\nlo\r\n1 \r\n!\r\n0\r\nx-trailer: 1\r\n\r\n",
                "hello!",
                true,
            ),
            ("HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", "a", true),
        ];
        for (text, expected, ends) in cases {
            for split in 0..=text.len() {
                let (_, headers, body, ended) = read(text.as_bytes(), split).unwrap();
                assert_eq!(
                    (std::str::from_utf8(&body).unwrap(), ended),
                    (expected, ends),
                    "{text:?} {split}"
                );
                assert!(!headers.contains_key("transfer-encoding") && !headers.contains_key("link"));
                assert_eq!(
                    headers.contains_key("content-length"),
                    text.contains("ontent-") && ends && !text.contains(";x")
                );
            }
        }
    }

    /// Answers that a seed has spoilt: nothing panics, and how they are cut makes no difference.
    #[test]
    fn at_random_answers_are_read_alike_however_they_are_cut() {
        let seed = 13;
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let right = [
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close, x\r\nx: y\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\ndata: \r\n3;a=b\r\n1\n\n\r\n0\r\nt: u\r\n\r\n",
            "HTTP/1.0 200 OK\r\n\r\nall of it",
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n",
        ];
        let mut good = 0;
        for _ in 0..20_000 {
            let mut text = right[rng.random_range(0..right.len())].as_bytes().to_vec();
            for _ in 0..rng.random_range(0..3) {
                let at = rng.random_range(0..text.len());
                match rng.random_range(0..4) {
                    0 => text[at] = rng.random(),
                    1 => text.truncate(at.max(1)),
                    2 => drop(text.remove(at)),
                    _ => text.insert(at, b"\r\n:;,0f\xff"[rng.random_range(0..8)]),
                }
                if text.is_empty() {
                    text.push(b'H');
                }
            }
            let whole = read_pieces([&text[..]]);
            let length = rng.random_range(1..8);
            let pieces = read_pieces(text.chunks(length));
            good += usize::from(whole.is_ok());
            // What was wrong may be noticed at another place.
            assert_eq!(whole.is_err(), pieces.is_err(), "{:?} by {length}", String::from_utf8_lossy(&text));
            if let (Ok(whole), Ok(pieces)) = (whole, pieces) {
                assert_eq!(whole, pieces);
            }
        }
        assert!((5_000..19_000).contains(&good), "{good}");
    }

    #[test]
    fn what_is_between_neighbours_stays_there_and_the_rest_passes() {
        let text = "HTTP/1.1 429 Slow\r\nConnection: Keep-Alive, x-hop\r\nx-hop: 1\r\nKeep-Alive: timeout=5\r\n\
                    set-cookie: a\r\nset-cookie: b\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n";
        let mut input = BytesMut::from(text);
        let head = Head::take(&mut input, true).unwrap().unwrap();
        assert!(head.keeps);
        let mut names: Vec<&str> = head.parts.headers.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-length", "retry-after", "set-cookie", "set-cookie"]);
        for last in
            ["HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", "HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"]
        {
            assert!(!Head::take(&mut BytesMut::from(last), true).unwrap().unwrap().keeps, "{last}");
        }
        let alone = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n";
        assert_eq!(Head::take(&mut BytesMut::from(alone), false).unwrap().unwrap().body, Body::Ended);
    }

    #[test]
    fn chunks_that_came_together_are_one_piece_and_one_alone_is_not_copied() {
        let mut input = BytesMut::from("3\r\nabc\r\n2\r\nde\r\n1\r\nf");
        let mut body = Body::Chunked(Chunk::Size);
        assert_eq!(body.take(&mut input).unwrap(), Taken::Data("abcdef".into()));
        assert_eq!(body.take(&mut input).unwrap(), Taken::More);
        let mut input = BytesMut::from("\r\n4\r\nwxyz\r\n");
        let at = input.as_ptr() as usize;
        let Taken::Data(data) = body.take(&mut input).unwrap() else { panic!("nothing is there") };
        assert_eq!((&data[..], data.as_ptr() as usize), (&b"wxyz"[..], at + 5));
    }

    #[test]
    fn nonsense_is_refused_and_an_early_end_is_told() {
        for wrong in [
            "SSH-2.0-OpenSSH\r\n",
            "HTTP/2 200 OK\r\n\r\n",
            "HTTP/1.1 xx OK\r\n\r\n",
            "HTTP/1.1 101 Now\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\nab\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1111111111111111\r\n",
        ] {
            assert!(read(wrong.as_bytes(), wrong.len()).is_err(), "{wrong:?}");
        }
        let long = format!("HTTP/1.1 200 {}", "x".repeat(HEAD_BYTES_MAX));
        assert!(Head::take(&mut BytesMut::from(long.as_str()), true).is_err());
        for mut open in [Body::Sized(1), Body::Chunked(Chunk::Size), Body::Chunked(Chunk::Trailer)] {
            assert!(open.close().is_err());
        }
        assert_eq!(Body::UntilClose.close(), Ok(()));
    }
}
