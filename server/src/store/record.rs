//! The storage format of responses and conversations: lines that consist of a letter, a space and JSON.
//!
//! A line can be appended without rewriting the lines before it, and read without parsing the others. The letters mean:
//!
//! | letter | JSON |
//! |---|---|
//! | `h` | the response without its output, or the conversation |
//! | `i` | the ID of an input item, a space, and the item |
//! | `o` | the same for an output item |
//! | `e` | an event of the response's stream, as a string |
//! | `n` | the number of item IDs generated for a conversation, 0 for a response; the last line of each write |
//!
//! Lines after the last `n` belong to an incomplete write and are ignored.

use std::collections::HashSet;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use server_openai::responses::{Conversation, Item, Response};

use super::error::{DEPTH_MAX, Error};
use super::index::Chunks;

const HEAD: u8 = b'h';
const INPUT: u8 = b'i';
const OUTPUT: u8 = b'o';
const EVENT: u8 = b'e';
const GENERATED_IDS: u8 = b'n';

/// A response and its input.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ResponseRecord {
    pub(crate) response: Response,
    /// The input items of the request, without those of earlier responses.
    pub(crate) input: Vec<Arc<Item>>,
    /// The encoded events of the response's stream, if they can be replayed.
    pub(crate) events: Option<Vec<Arc<str>>>,
}

/// A new conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ConversationRecord {
    pub(crate) conversation: Conversation,
    pub(crate) items: Vec<Arc<Item>>,
    /// Number of item IDs that have been generated.
    pub(crate) generated_ids: u32,
}

/// New items of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NewItems {
    pub(crate) items: Vec<Arc<Item>>,
    /// Number of item IDs that have been generated for the conversation, including those of earlier items.
    pub(crate) generated_ids: u32,
}

/// The number of items of a conversation, and the number of item IDs that have been generated for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ItemCounts {
    pub(crate) items: usize,
    /// Number of item IDs that have been generated.
    pub(crate) generated_ids: u32,
}

/// Checks that no item has one of the `taken` IDs or the ID of an earlier item. Requests name items by their IDs, so of
/// two items with the same ID, only one could be listed and retrieved.
///
/// # Errors
/// Two items would have the same ID ([`Error::DuplicateItem`]).
pub(crate) fn check_ids<'a>(
    taken: impl IntoIterator<Item = &'a str>,
    items: &'a [Arc<Item>],
) -> Result<(), Error> {
    let mut ids: HashSet<&str> = taken.into_iter().collect();
    match items.iter().find(|item| !ids.insert(item.id())) {
        Some(item) => Err(Error::DuplicateItem { id: item.id().to_owned() }),
        None => Ok(()),
    }
}

/// The lines of a record, or of an addition to it.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<u8>);

impl Lines {
    /// Encodes a response.
    ///
    /// # Errors
    /// The record would be nested too deeply ([`Error::TooDeep`]).
    pub(super) fn of_response(record: ResponseRecord) -> Result<Self, Error> {
        let ResponseRecord { mut response, input, events } = record;
        let output = std::mem::take(&mut response.output);
        let mut lines = Self::default();
        lines.push(HEAD, &response)?;
        for item in &input {
            lines.item(INPUT, item)?;
        }
        for item in &output {
            lines.item(OUTPUT, item)?;
        }
        for event in events.iter().flatten() {
            lines.push(EVENT, &**event)?;
        }
        lines.finish(0)
    }

    /// Encodes a conversation.
    ///
    /// # Errors
    /// The record would be nested too deeply ([`Error::TooDeep`]).
    pub(super) fn of_conversation(record: &ConversationRecord) -> Result<Self, Error> {
        let mut lines = Self::default();
        lines.push(HEAD, &record.conversation)?;
        lines.extend(&record.items, record.generated_ids)
    }

    /// Encodes new items of a conversation.
    ///
    /// # Errors
    /// The record would be nested too deeply ([`Error::TooDeep`]).
    pub(super) fn of_items(items: &[Arc<Item>], generated_ids: u32) -> Result<Self, Error> {
        Self::default().extend(items, generated_ids)
    }

    /// Encodes a conversation with a new head.
    ///
    /// # Errors
    /// The record would be nested too deeply ([`Error::TooDeep`]).
    pub(super) fn with_head(stored: &StoredRecord, conversation: &Conversation) -> Result<Self, Error> {
        let mut lines = Self::default();
        lines.push(HEAD, conversation)?;
        lines.copy(stored, |line| line.tag != HEAD);
        Ok(lines)
    }

    /// Encodes a conversation without the item at the index `removed`.
    pub(super) fn without(stored: &StoredRecord, removed: usize) -> Self {
        let (mut lines, mut items) = (Self::default(), 0);
        lines.copy(stored, |line| {
            items += usize::from(line.tag == INPUT);
            line.tag != INPUT || items != removed + 1
        });
        lines
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn extend(mut self, items: &[Arc<Item>], generated_ids: u32) -> Result<Self, Error> {
        for item in items {
            self.item(INPUT, item)?;
        }
        self.finish(generated_ids)
    }

    fn finish(mut self, generated_ids: u32) -> Result<Self, Error> {
        self.push(GENERATED_IDS, &generated_ids)?;
        Ok(self)
    }

    fn item(&mut self, tag: u8, item: &Item) -> Result<(), Error> {
        self.0.extend_from_slice(&[tag, b' ']);
        write(&mut self.0, item.id());
        self.0.push(b' ');
        self.end(item)
    }

    fn push(&mut self, tag: u8, value: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        self.0.extend_from_slice(&[tag, b' ']);
        self.end(value)
    }

    fn end(&mut self, value: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        let begin = self.0.len();
        write(&mut self.0, value);
        if depth(&self.0[begin..]) > DEPTH_MAX {
            return Err(Error::TooDeep);
        }
        self.0.push(b'\n');
        Ok(())
    }

    fn copy(&mut self, stored: &StoredRecord, is_copied: impl FnMut(&Line<'_>) -> bool) {
        for line in stored.lines().filter(is_copied) {
            self.0.extend_from_slice(&[line.tag, b' ']);
            self.0.extend_from_slice(line.json);
            self.0.push(b'\n');
        }
    }
}

fn write(bytes: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(bytes, value).expect("invariant: records can be written as JSON");
}

/// Returns the nesting depth of this JSON.
fn depth(json: &[u8]) -> usize {
    let (mut depth, mut deepest, mut in_string, mut is_escaped) = (0_usize, 0, false, false);
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[derive(Clone, Debug)]
pub(crate) struct StoredRecord(Chunks);

/// A line of a record.
#[derive(Clone, Copy, Debug)]
struct Line<'a> {
    tag: u8,
    json: &'a [u8],
}

/// An unparsed item of a record, with its ID.
#[derive(Clone, Debug)]
pub(crate) struct StoredItem<'a> {
    pub(crate) id: String,
    json: &'a [u8],
}

impl StoredItem<'_> {
    /// Returns the size of the item's JSON in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.json.len() as u64
    }

    /// Parses the item.
    ///
    /// # Errors
    /// The record is damaged.
    pub(crate) fn parse(&self) -> Result<Item, serde_json::Error> {
        serde_json::from_slice(self.json)
    }
}

impl StoredRecord {
    pub(super) fn new(chunks: Chunks) -> Self {
        Self(chunks)
    }

    /// Creates the record from the content of a file, without an incomplete write at the end of the file.
    pub(super) fn of_file(mut bytes: Vec<u8>) -> Self {
        bytes.truncate(finished(&bytes));
        Self(Arc::new(vec![bytes.into()]))
    }

    /// Returns the response with its output.
    ///
    /// # Errors
    /// The record is damaged.
    pub(crate) fn response(&self) -> Result<Response, serde_json::Error> {
        let mut response: Response = self.head()?;
        for item in self.output() {
            response.output.push(item?.parse()?);
        }
        Ok(response)
    }

    /// Returns the response without its output, or the conversation.
    ///
    /// # Errors
    /// The record is damaged.
    pub(crate) fn head<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        // A missing head is an error like any other damage.
        let head = self.tagged(HEAD).next().unwrap_or_default();
        serde_json::from_slice(head)
    }

    /// Returns the input items: the items of a conversation, or the input items of the request that a response answers.
    pub(crate) fn input(&self) -> impl Iterator<Item = Result<StoredItem<'_>, serde_json::Error>> {
        self.tagged(INPUT).map(item)
    }

    /// Checks that `items`, which will be added to the record, have distinct IDs, and that no item of the record has
    /// one of these IDs.
    ///
    /// # Errors
    /// Two items would have the same ID ([`Error::DuplicateItem`]).
    pub(crate) fn check_new_ids(&self, items: &[Arc<Item>]) -> Result<(), Error> {
        let stored: Vec<String> = self.input().filter_map(|item| Some(item.ok()?.id)).collect();
        check_ids(stored.iter().map(String::as_str), items)
    }

    /// Returns the output items of a response.
    pub(crate) fn output(&self) -> impl Iterator<Item = Result<StoredItem<'_>, serde_json::Error>> {
        self.tagged(OUTPUT).map(item)
    }

    /// Returns the events of a response's stream, or none if they cannot be replayed.
    pub(crate) fn events(&self) -> impl Iterator<Item = Result<String, serde_json::Error>> {
        self.tagged(EVENT).map(serde_json::from_slice)
    }

    pub(crate) fn counts(&self) -> ItemCounts {
        let mut counts = ItemCounts::default();
        for line in self.lines() {
            match line.tag {
                INPUT => counts.items += 1,
                GENERATED_IDS => {
                    counts.generated_ids = serde_json::from_slice(line.json).unwrap_or(counts.generated_ids)
                }
                _ => {}
            }
        }
        counts
    }

    /// Returns the size of the record in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|chunk| chunk.len() as u64).sum()
    }

    fn tagged(&self, tag: u8) -> impl Iterator<Item = &[u8]> {
        self.lines().filter(move |line| line.tag == tag).map(|line| line.json)
    }

    fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.0.iter().flat_map(|chunk| lines(chunk).map(|(_, line)| line))
    }
}

/// Returns the lines of a chunk with the positions of their ends. Malformed lines are skipped.
fn lines(chunk: &[u8]) -> impl Iterator<Item = (usize, Line<'_>)> {
    let mut begin = 0;
    memchr::memchr_iter(b'\n', chunk).filter_map(move |end| {
        let line = &chunk[std::mem::replace(&mut begin, end + 1)..end];
        let (&tag, rest) = line.split_first()?;
        Some((end + 1, Line { tag, json: rest.strip_prefix(b" ")? }))
    })
}

/// Returns the number of bytes up to the end of the last complete write.
pub(super) fn finished(bytes: &[u8]) -> usize {
    lines(bytes).filter(|(_, line)| line.tag == GENERATED_IDS).last().map_or(0, |(end, _)| end)
}

fn item(line: &[u8]) -> Result<StoredItem<'_>, serde_json::Error> {
    let mut ids = serde_json::Deserializer::from_slice(line).into_iter::<String>();
    // A missing ID is an error like any other damage.
    let id = ids.next().unwrap_or_else(|| serde_json::from_slice(b""))?;
    Ok(StoredItem { id, json: &line[ids.byte_offset()..] })
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};
    use serde_json::{Value, json};

    use super::*;

    fn said(id: &str, text: &str) -> Arc<Item> {
        let item = json!({"type": "message", "id": id, "status": "completed", "role": "user",
            "content": [{"type": "input_text", "text": text}]});
        Arc::new(serde_json::from_value(item).unwrap())
    }

    fn conversation(metadata: &Value) -> Conversation {
        serde_json::from_value(
            json!({"id": "c", "object": "conversation", "created_at": 1, "metadata": metadata}),
        )
        .unwrap()
    }

    fn stored(lines: &[Lines]) -> StoredRecord {
        let chunk = |lines: &Lines| lines.0.clone().into();
        StoredRecord::new(Arc::new(lines.iter().map(chunk).collect()))
    }

    fn texts(stored: &StoredRecord) -> Vec<String> {
        let text = |item: StoredItem<'_>| match item.parse().unwrap() {
            Item::Message(message) => format!("{} {}", item.id, message.content[0].text()),
            other => panic!("{other:?}"),
        };
        stored.input().map(|item| text(item.unwrap())).collect()
    }

    #[test]
    fn items_with_any_ids_and_texts_are_appended_removed_and_read() {
        let (first, second) = (said("a \"b\"\n", "one\nn 9\n"), said("b", "two"));
        let head = conversation(&json!({}));
        let items = vec![Arc::clone(&first)];
        let record = ConversationRecord { conversation: head.clone(), items, generated_ids: 1 };
        let whole = Lines::of_conversation(&record).unwrap();
        let added = Lines::of_items(&[second, Arc::clone(&first)], 3).unwrap();
        let both = stored(&[whole, added]);
        assert_eq!(texts(&both), ["a \"b\"\n one\nn 9\n", "b two", "a \"b\"\n one\nn 9\n"]);
        assert_eq!(both.counts(), ItemCounts { items: 3, generated_ids: 3 });
        let has_room_for = |ids: &[&str]| {
            let items: Vec<_> = ids.iter().map(|id| said(id, "x")).collect();
            both.check_new_ids(&items).is_ok()
        };
        assert!(has_room_for(&["c", "d"]) && !has_room_for(&["c", "c"]) && !has_room_for(&["c", "b"]));
        assert_eq!(both.head::<Conversation>().unwrap(), head);
        let without = stored(&[Lines::without(&both, 1)]);
        assert_eq!(texts(&without).len(), 2);
        assert_eq!(without.counts(), ItemCounts { items: 2, generated_ids: 3 }, "no ID is generated twice");
        let changed = conversation(&json!({"a": "b"}));
        let changed_head = stored(&[Lines::with_head(&both, &changed).unwrap()]);
        assert_eq!(changed_head.head::<Conversation>().unwrap(), changed);
        assert_eq!(texts(&changed_head), texts(&both));
    }

    #[test]
    fn an_incomplete_write_is_ignored_wherever_it_ends() {
        let items = vec![said("a", "one")];
        let record = ConversationRecord { conversation: conversation(&json!({})), items, generated_ids: 1 };
        let whole = Lines::of_conversation(&record).unwrap();
        let added = Lines::of_items(&[said("b", "two"), said("c", "three")], 3).unwrap();
        let file = [whole.0.as_slice(), &added.0].concat();
        for end in whole.0.len()..=file.len() {
            let read = StoredRecord::of_file(file[..end].to_vec());
            let items = if end == file.len() { 3 } else { 1 };
            assert_eq!(read.counts().items, items, "{end} of {}", file.len());
        }
    }

    #[test]
    fn damaged_lines_are_errors_and_never_panics() {
        for text in ["", "h {\n", "i\n", "i \n", "i \"a\n", "i \"a\" {\n", "x\n\n \n", "i 1 {}\nn -1\n"] {
            let read = stored(&[Lines(text.as_bytes().to_vec())]);
            assert!(read.head::<Conversation>().is_err() && read.response().is_err(), "{text:?}");
            let is_damaged = |item: Result<StoredItem<'_>, _>| item.and_then(|item| item.parse()).is_err();
            assert!(read.input().all(is_damaged), "{text:?}");
            assert_eq!(read.counts().generated_ids, 0);
        }
    }

    #[test]
    fn any_damaged_file_is_read_without_a_panic() {
        let items = vec![said("a", "one"), said("b \" \\", "two")];
        let record =
            ConversationRecord { conversation: conversation(&json!({"k": "v"})), items, generated_ids: 1 };
        let whole = Lines::of_conversation(&record).unwrap().into_bytes();
        let mut rng = StdRng::seed_from_u64(7);
        let mut random = |below: usize| rng.random_range(0..below);
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..=random(4) {
                let at = random(bytes.len());
                match random(4) {
                    0 => bytes[at] = random(256) as u8,
                    1 => bytes[at] = b" \n\"{}[]hioen"[random(12)],
                    2 => bytes.truncate(at + 1),
                    _ => bytes.extend_from_within(at..),
                }
            }
            let read = StoredRecord::of_file(bytes.clone());
            assert!(read.bytes() <= bytes.len() as u64);
            let parsed = read.input().chain(read.output()).filter_map(|item| item.ok()?.parse().ok()).count();
            assert!(parsed <= lines(&bytes).count());
            let _ = (read.response(), read.head::<Conversation>(), read.events().count());
            assert!(read.counts().items <= lines(&bytes).count());
        }
    }
}
