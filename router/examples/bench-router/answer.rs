//! Parses the framing of an HTTP/1.1 answer as the answer arrives, to determine whether it is complete and how many
//! events it contains.

use anyhow::{Context as _, bail, ensure};

/// The largest size of the head of an answer or of a line of its framing, in bytes.
const LINE_BYTES_MAX: usize = 16 * 1024;

/// The part of an answer that has arrived.
#[derive(Debug)]
pub(crate) struct Answer {
    state: ParseState,
    /// The part of the current head or line that has arrived.
    line: Vec<u8>,
    is_chunked: bool,
    /// The previous byte, which is needed to recognize the blank line that ends an event.
    last: u8,
    /// The status code of the answer; 0 until the head has arrived.
    pub(crate) status: u16,
    /// The number of bytes of the body that have arrived.
    pub(crate) bytes: usize,
    /// The number of complete events.
    pub(crate) events: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ParseState {
    Head,
    /// The parser expects the size of a chunk.
    Size,
    /// The parser is within a body or a chunk with this number of remaining bytes.
    Body(usize),
    /// The parser expects the line end after a chunk.
    ChunkEnd,
    /// The parser expects the blank line after the last chunk.
    Trailer,
    Done,
}

impl Answer {
    pub(crate) fn new() -> Self {
        Self {
            state: ParseState::Head,
            line: Vec::new(),
            is_chunked: false,
            last: 0,
            status: 0,
            bytes: 0,
            events: 0,
        }
    }

    /// Whether the whole answer has arrived.
    pub(crate) fn is_done(&self) -> bool {
        self.state == ParseState::Done
    }

    /// Parses bytes that have arrived.
    ///
    /// # Errors
    /// The bytes are not a valid continuation of the answer.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) -> anyhow::Result<()> {
        while !bytes.is_empty() {
            bytes = match self.state {
                ParseState::Head => self.head(bytes)?,
                ParseState::Size => self.size(bytes)?,
                ParseState::Body(left) => self.body(bytes, left),
                ParseState::ChunkEnd => self.line_end(bytes, ParseState::Size)?,
                ParseState::Trailer => self.line_end(bytes, ParseState::Done)?,
                ParseState::Done => bail!("unexpected data after the end of the answer"),
            };
        }
        Ok(())
    }

    /// Consumes the bytes up to and including `end`, and returns the rest, or `None` if `end` has not arrived yet.
    fn until<'a>(&mut self, bytes: &'a [u8], end: &[u8]) -> anyhow::Result<Option<&'a [u8]>> {
        let before = self.line.len();
        self.line.extend_from_slice(bytes);
        ensure!(
            before <= LINE_BYTES_MAX,
            "the head of the answer or a line of its framing is longer than {LINE_BYTES_MAX} bytes"
        );
        // The first bytes of `end` may have arrived earlier.
        let from = before.saturating_sub(end.len());
        let Some(at) = memchr::memmem::find(&self.line[from..], end) else { return Ok(None) };
        let end = from + at + end.len();
        self.line.truncate(end);
        Ok(Some(&bytes[end - before..]))
    }

    fn head<'a>(&mut self, bytes: &'a [u8]) -> anyhow::Result<&'a [u8]> {
        let Some(rest) = self.until(bytes, b"\r\n\r\n")? else { return Ok(&[]) };
        let head = std::mem::take(&mut self.line);
        let head = std::str::from_utf8(&head).context("the head is not valid UTF-8")?;
        let mut lines = head.lines();
        let status =
            lines.next().and_then(|line| line.split(' ').nth(1)).context("the answer has no status code")?;
        self.status = status.parse::<u16>().context("the status code is not a number")?;
        let mut length: Option<usize> = None;
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            if name.eq_ignore_ascii_case("content-length") {
                length = Some(value.trim().parse().context("the Content-Length is not a number")?);
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                self.is_chunked = value.trim().eq_ignore_ascii_case("chunked");
            }
        }
        self.state = match length {
            _ if self.is_chunked => ParseState::Size,
            Some(0) => ParseState::Done,
            Some(length) => ParseState::Body(length),
            None => bail!("the answer has neither a Content-Length nor chunked framing"),
        };
        Ok(rest)
    }

    fn size<'a>(&mut self, bytes: &'a [u8]) -> anyhow::Result<&'a [u8]> {
        let Some(rest) = self.until(bytes, b"\r\n")? else { return Ok(&[]) };
        let size = std::str::from_utf8(&self.line)?.trim().split(';').next().unwrap_or_default();
        self.state = match usize::from_str_radix(size, 16).context("invalid chunk size")? {
            0 => ParseState::Trailer,
            size => ParseState::Body(size),
        };
        self.line.clear();
        Ok(rest)
    }

    fn body<'a>(&mut self, bytes: &'a [u8], left: usize) -> &'a [u8] {
        let (body, rest) = bytes.split_at(left.min(bytes.len()));
        self.bytes += body.len();
        for &byte in body {
            if byte == b'\n' && self.last == b'\n' {
                self.events += 1;
            }
            self.last = byte;
        }
        self.state = match left - body.len() {
            0 if self.is_chunked => ParseState::ChunkEnd,
            0 => ParseState::Done,
            left => ParseState::Body(left),
        };
        rest
    }

    fn line_end<'a>(&mut self, bytes: &'a [u8], next: ParseState) -> anyhow::Result<&'a [u8]> {
        let Some(rest) = self.until(bytes, b"\r\n")? else { return Ok(&[]) };
        ensure!(self.line == b"\r\n", "no line end follows the chunk");
        self.line.clear();
        self.state = next;
        Ok(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_answers_with_any_framing_in_pieces_of_any_size() {
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                       8\r\ndata: 1\n\r\n1\r\n\n\r\n11\r\ndata: 2\n\ndata: 3\n\r\n1\r\n\n\r\n0\r\n\r\n";
        let sized = "HTTP/1.1 429 No\r\ncontent-length: 4\r\n\r\n{}\n\n";
        for (text, expected) in [(chunked, (200, 27, 3)), (sized, (429, 4, 1))] {
            for pieces in 1..text.len() {
                let mut answer = Answer::new();
                for piece in text.as_bytes().chunks(pieces) {
                    assert!(!answer.is_done());
                    answer.feed(piece).unwrap();
                }
                assert!(answer.is_done(), "{pieces}");
                assert_eq!((answer.status, answer.bytes, answer.events), expected);
                assert!(answer.feed(b"x").is_err());
            }
        }
        let longer = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n";
        for wrong in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 x\r\n\r\n", "\r\n\r\n", longer] {
            assert!(Answer::new().feed(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
