use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Barrier, mpsc};
use std::time::Duration;

use serde_json::{Map, json};
use server_openai::responses::Object;

use super::*;

const NOBODY: Tenant = Tenant::NOBODY;

fn tenant() -> Tenant {
    Tenant::default()
}

fn item(text: &str) -> Arc<Item> {
    let item = json!({"type": "message", "id": "msg_1", "status": "completed", "role": "user",
        "content": [{"type": "input_text", "text": text}]});
    Arc::new(serde_json::from_value(item).unwrap())
}

fn conversation(id: Id) -> Conversation {
    Conversation { id: id.to_string(), object: Object::Conversation, created_at: 1, metadata: Map::new() }
}

fn record(id: Id, items: Vec<Arc<Item>>) -> ConversationRecord {
    ConversationRecord { conversation: conversation(id), items, generated_ids: 0 }
}

fn put(store: &Store, text: &str) -> Id {
    let id = store.new_id(Kind::Conversation);
    store.put_conversation(&record(id, vec![item(text)]), tenant()).unwrap();
    id
}

fn add(store: &Store, id: Id, text: &str) -> Result<bool, Error> {
    let items = |stored: &StoredRecord| {
        let generated_ids = stored.counts().generated_ids + 1;
        Ok::<_, Error>(NewItems { items: vec![item(text)], generated_ids })
    };
    let added = store.append(id, tenant(), items);
    added.map(|added| added.is_some())
}

fn texts(store: &Store, id: Id) -> Option<Vec<String>> {
    let stored = store.get(id, tenant()).unwrap()?;
    let text = |item: StoredItem<'_>| match item.parse().unwrap() {
        Item::Message(message) => message.content[0].text().to_owned(),
        other => panic!("{other:?}"),
    };
    Some(stored.input().map(|item| text(item.unwrap())).collect())
}

fn config(directory: Option<&Path>) -> StoreConfig {
    StoreConfig {
        max_stored_responses: 3,
        max_stored_bytes: 10_000,
        response_store_dir: directory.map(Path::to_owned),
    }
}

#[test]
fn records_are_stored_changed_and_removed_in_memory_and_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    for directory in [None, Some(directory.path())] {
        let store = Store::open(&config(directory)).unwrap();
        let id = put(&store, "a");
        assert!(add(&store, id, "b").unwrap() && add(&store, id, "c").unwrap());
        assert_eq!(texts(&store, id).unwrap(), ["a", "b", "c"]);
        let removed = store.remove_item(id, tenant(), |_| Ok::<_, Error>((1, "it"))).unwrap();
        assert_eq!(removed, Some("it"));
        let changed =
            Conversation { metadata: Map::from_iter([("k".to_owned(), json!("v"))]), ..conversation(id) };
        store.set_head(id, tenant(), |_| Ok::<_, Error>(changed.clone())).unwrap().unwrap();
        assert!(add(&store, id, "d").unwrap());
        assert_eq!(texts(&store, id).unwrap(), ["a", "c", "d"]);
        let stored = store.get(id, tenant()).unwrap().unwrap();
        assert_eq!(stored.head::<Conversation>().unwrap(), changed);
        assert_eq!(stored.counts(), ItemCounts { items: 3, generated_ids: 3 });
        assert!(store.get(id.owner(Kind::Response), tenant()).unwrap().is_none());
        assert!(store.remove(id, tenant()) && !store.remove(id, tenant()));
        assert!(texts(&store, id).is_none() && !add(&store, id, "e").unwrap());
    }
}

#[test]
fn a_conversation_that_is_deleted_during_a_change_remains_deleted() {
    let directory = tempfile::tempdir().unwrap();
    for directory in [None, Some(directory.path())] {
        let store = Store::open(&config(directory)).unwrap();
        let id = put(&store, "a");
        let changed = store.set_head(id, tenant(), |_| {
            assert!(store.remove(id, tenant()));
            Ok::<_, Error>(conversation(id))
        });
        assert_eq!(changed.unwrap(), None);
        assert!(texts(&store, id).is_none());
        let id = put(&store, "b");
        let changed = store.remove_item(id, tenant(), |_| {
            assert!(store.remove(id, tenant()));
            Ok::<_, Error>((0, "it"))
        });
        assert_eq!(changed.unwrap(), None);
        assert!(texts(&store, id).is_none());
    }
    let files = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(files, 1, "only the file with the store ID is left");
}

#[test]
fn a_record_is_visible_only_to_its_tenant_even_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let owner = Tenant::parse("0123456789abcdef0123456789abcdef").unwrap();
    for directory in [None, Some(directory.path())] {
        let store = Store::open(&config(directory)).unwrap();
        let id = store.new_id(Kind::Conversation);
        store.put_conversation(&record(id, vec![item("a")]), owner).unwrap();
        let store = if directory.is_some() {
            drop(store);
            Store::open(&config(directory)).unwrap()
        } else {
            store
        };
        for other in [Tenant::default(), NOBODY] {
            assert!(store.get(id, other).unwrap().is_none() && !store.remove(id, other));
            assert_eq!(store.chain(id, other), Err(ChainError::Lost(id)));
            let added =
                |_: &StoredRecord| Ok::<_, Error>(NewItems { items: vec![item("b")], generated_ids: 0 });
            assert!(store.append(id, other, added).unwrap().is_none());
            let changed = store.set_head(id, other, |_| Ok::<_, Error>(conversation(id))).unwrap();
            assert!(changed.is_none());
        }
        assert!(store.get(id, owner).unwrap().is_some());
    }
}

#[test]
fn ids_contain_the_store_id_and_are_unique() {
    let store = Store::open(&config(None)).unwrap();
    let names: BTreeSet<String> = (0..1000).map(|_| store.new_id(Kind::Response).to_string()).collect();
    assert_eq!(names.len(), 1000);
    let store_id = format!("resp_{:016x}", store.store_id());
    assert!(names.iter().all(|name| name.starts_with(&store_id)));
    assert_ne!(Store::open(&config(None)).unwrap().store_id(), store.store_id());
}

#[test]
fn whether_the_store_is_enabled_is_known_while_the_index_is_locked() {
    let store = Store::open(&config(None)).unwrap();
    std::thread::scope(|scope| {
        let index = store.index();
        let (sender, receiver) = mpsc::channel();
        let store = &store;
        scope.spawn(move || sender.send((store.is_enabled(), store.id_if_enabled())).unwrap());
        let known = receiver.recv_timeout(Duration::from_secs(60));
        drop(index);
        assert_eq!(known, Ok((true, store.store_id())));
    });
}

#[test]
fn a_directory_outlives_the_process_with_its_store_id_and_its_limits() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    let store_id = store.store_id();
    let stored: Vec<Id> = (0..5).map(|number| put(&store, &number.to_string())).collect();
    drop(store);
    // Create an incomplete file, as if a server had died while writing it, and an unrelated file.
    std::fs::write(directory.path().join("unfinished-x"), "half").unwrap();
    std::fs::write(directory.path().join("notes.record"), "{}").unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    assert_eq!(store.store_id(), store_id);
    let exist: Vec<bool> = stored.iter().map(|&id| texts(&store, id).is_some()).collect();
    assert_eq!(exist, [false, false, true, true, true]);
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        5,
        "three records, the store ID and the unrelated file"
    );
    drop(store);
    let fewer = StoreConfig { max_stored_responses: 1, ..config(Some(directory.path())) };
    let store = Store::open(&fewer).unwrap();
    assert!(texts(&store, stored[3]).is_none());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 3);
}

#[test]
fn only_one_server_can_use_a_directory_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    assert!(matches!(Store::open(&config(Some(directory.path()))), Err(Error::InUse(_))));
    drop(store);
    Store::open(&config(Some(directory.path()))).unwrap();
}

#[test]
fn an_interrupted_append_is_overwritten_by_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    let id = put(&store, "a");
    let path = directory.path().join(format!("{id}.record"));
    let whole = std::fs::read(&path).unwrap();
    assert!(add(&store, id, "lost").unwrap());
    drop(store);
    let longer = std::fs::read(&path).unwrap();
    assert!(longer.starts_with(&whole), "the file is appended to, not rewritten");
    // If the process dies during an append, the append has no effect after the next start or any later one.
    std::fs::write(&path, &longer[..longer.len() - 1]).unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    assert_eq!(texts(&store, id).unwrap(), ["a"]);
    assert!(add(&store, id, "b").unwrap());
    assert_eq!(texts(&store, id).unwrap(), ["a", "b"]);
    drop(store);
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    assert_eq!(texts(&store, id).unwrap(), ["a", "b"]);
    // A failed write leaves bytes after the end that is recorded in the index.
    let torn = [std::fs::read(&path).unwrap(), b"i \"msg_1\" {\"type\"".to_vec()].concat();
    std::fs::write(&path, torn).unwrap();
    assert!(add(&store, id, "c").unwrap());
    assert_eq!(texts(&store, id).unwrap(), ["a", "b", "c"]);
}

#[test]
fn a_full_conversation_rejects_more_items() {
    let large = StoreConfig { max_stored_bytes: 1 << 30, ..StoreConfig::default() };
    let store = Store::open(&large).unwrap();
    let id = put(&store, "a");
    let many: Vec<_> = (0..CONVERSATION_ITEMS_MAX).map(|_| item("x")).collect();
    store
        .append(id, tenant(), |_| Ok::<_, Error>(NewItems { items: many, generated_ids: 0 }))
        .unwrap()
        .unwrap();
    assert!(matches!(add(&store, id, "b"), Err(Error::Full { .. })));
    let id = put(&store, &"x".repeat(9 << 20));
    assert!(add(&store, id, &"x".repeat(9 << 20)).unwrap());
    assert!(matches!(add(&store, id, "b"), Err(Error::Full { .. })));
    let id = store.new_id(Kind::Conversation);
    let larger = store.put_conversation(&record(id, vec![item(&"x".repeat(33 << 20))]), tenant());
    assert!(matches!(larger, Err(Error::TooLarge { .. })));
}

#[test]
fn a_conversation_that_is_larger_than_any_addition_can_be_changed() {
    let store = Store::open(&StoreConfig { max_stored_bytes: 1 << 30, ..config(None) }).unwrap();
    let id = put(&store, "a");
    for bytes in [15 << 20, 20 << 20] {
        assert!(add(&store, id, &"x".repeat(bytes)).unwrap());
    }
    let removed = store.remove_item(id, tenant(), |_| Ok::<_, Error>((0, "it"))).unwrap();
    assert_eq!(removed, Some("it"));
    let changed = store.set_head(id, tenant(), |_| Ok::<_, Error>(conversation(id))).unwrap();
    assert_eq!(changed, Some(conversation(id)));
    assert_eq!(texts(&store, id).unwrap().len(), 2);
}

#[test]
fn the_size_of_the_store_includes_appended_items() {
    let store = Store::open(&StoreConfig { max_stored_bytes: 3000, ..StoreConfig::default() }).unwrap();
    let first = put(&store, &"x".repeat(1000));
    let second = put(&store, "y");
    assert!(add(&store, second, &"y".repeat(1800)).unwrap());
    assert!(texts(&store, first).is_none(), "the least recently used record is evicted");
    assert_eq!(texts(&store, second).unwrap().len(), 2);
    assert!(matches!(add(&store, second, &"y".repeat(1800)), Err(Error::TooLarge { .. })));
}

#[test]
fn concurrent_appends_lose_nothing() {
    let directory = tempfile::tempdir().unwrap();
    for directory in [None, Some(directory.path())] {
        let store = Store::open(&StoreConfig {
            response_store_dir: directory.map(Path::to_owned),
            ..StoreConfig::default()
        });
        let store = store.unwrap();
        let id = put(&store, "a");
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (store, barrier) = (&store, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    for number in 0..10 {
                        assert!(add(store, id, &format!("{thread} {number}")).unwrap());
                        assert!(!texts(store, id).unwrap().is_empty());
                    }
                });
            }
        });
        let all = texts(&store, id).unwrap();
        assert_eq!((all.len(), all.iter().collect::<BTreeSet<_>>().len()), (41, 41));
        assert_eq!(store.get(id, tenant()).unwrap().unwrap().counts().generated_ids, 40);
    }
}

#[test]
fn a_record_larger_than_the_store_is_rejected_and_a_damaged_one_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    let id = store.new_id(Kind::Conversation);
    let put_large = store.put_conversation(&record(id, vec![item(&"x".repeat(20_000))]), tenant());
    assert!(matches!(put_large, Err(Error::TooLarge { .. })));
    assert!(texts(&store, id).is_none());
    let id = put(&store, "x");
    std::fs::write(directory.path().join(format!("{id}.record")), "\nh {\nn 0\n").unwrap();
    let damaged = store.get(id, tenant()).unwrap().unwrap();
    assert!(damaged.head::<Conversation>().is_err());
}

#[test]
fn a_server_starts_with_a_damaged_store_id_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keeper");
    for damaged in
        [&b"\xff\x80\n"[..], b"", b"\n00", b"\n+000000000000001\n", b"\n0000000000000000\n", &[0; 5000]]
    {
        std::fs::write(&path, damaged).unwrap();
        let given = Store::open(&config(Some(directory.path()))).unwrap().store_id();
        assert!(given > 0xff, "{damaged:?} is not a number: {given}");
        let again = Store::open(&config(Some(directory.path()))).unwrap().store_id();
        assert_eq!(again, given, "{damaged:?}");
    }
}

#[test]
fn a_record_whose_first_line_is_damaged_belongs_to_no_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    let id = put(&store, "a");
    let path = directory.path().join(format!("{id}.record"));
    drop(store);
    let whole = std::fs::read_to_string(&path).unwrap();
    let (_, rest) = whole.split_once('\n').unwrap();
    let long = format!("0 - {}", "x".repeat(200));
    for first in ["0 -", "0 - ", "+0 - ", "00 - ", " - ", "0 - x", "0  ", "18446744073709551615 - ", &long] {
        // In the first case, the line is not terminated. An appended item would become a part of that line.
        let content = if first == "0 -" { first.to_owned() } else { format!("{first}\n{rest}") };
        std::fs::write(&path, content).unwrap();
        let is_sound = first == "0 - ";
        let store = Store::open(&config(Some(directory.path()))).unwrap();
        assert_eq!(texts(&store, id).is_some(), is_sound, "{first:?}");
        assert!(store.get(id, NOBODY).unwrap().is_none(), "{first:?}");
        assert_eq!(add(&store, id, "b").unwrap(), is_sound, "{first:?}");
    }
}

#[test]
fn a_damaged_number_of_a_file_does_not_make_later_files_older() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    let stored = [put(&store, "a"), put(&store, "b")];
    drop(store);
    let path = directory.path().join(format!("{}.record", stored[0]));
    let content = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, content.replacen('0', &u64::MAX.to_string(), 1)).unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    let later = [put(&store, "c"), put(&store, "d")];
    drop(store);
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    put(&store, "e");
    assert!(texts(&store, stored[1]).is_none(), "the oldest record is evicted");
    assert!(later.iter().all(|id| texts(&store, *id).is_some()));
}

#[test]
fn only_files_are_records() {
    let directory = tempfile::tempdir().unwrap();
    let id = put(&Store::open(&config(Some(directory.path()))).unwrap(), "a");
    let other = id.to_string().replacen("conv_", "resp_", 1);
    std::fs::create_dir(directory.path().join(format!("{other}.record"))).unwrap();
    std::fs::create_dir(directory.path().join("unfinished-x")).unwrap();
    let store = Store::open(&config(Some(directory.path()))).unwrap();
    assert!(texts(&store, id).is_some());
}

#[test]
fn json_that_could_not_be_read_again_is_rejected() {
    let store = Store::open(&StoreConfig::default()).unwrap();
    for (nested, is_stored) in [(120, true), (200, false)] {
        let id = store.new_id(Kind::Conversation);
        let mut value = json!(1);
        for _ in 0..nested {
            value = json!([value]);
        }
        let metadata = [("text \\\"[[[".to_owned(), json!("[".repeat(500))), ("deep".to_owned(), value)];
        let head = Conversation { metadata: Map::from_iter(metadata), ..conversation(id) };
        let whole = ConversationRecord { conversation: head.clone(), items: Vec::new(), generated_ids: 0 };
        let put = store.put_conversation(&whole, tenant());
        assert_eq!(put.is_ok(), is_stored, "{nested}");
        let read = store.get(id, tenant()).unwrap().map(|stored| stored.head::<Conversation>().unwrap());
        assert_eq!(read, is_stored.then_some(head));
    }
}
