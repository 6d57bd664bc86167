use serde_json::{Map, json};
use server_openai::responses::{Conversation, Item, Object};

use super::*;

fn conversation(store: &Store, items: Vec<Item>) -> (Id, ConversationRecord) {
    let id = store.name(Kind::Conversation);
    let conversation = Conversation {
        id: id.to_string(),
        object: Object::Conversation,
        created_at: 1,
        metadata: Map::new(),
    };
    (id, ConversationRecord { conversation, items, named: 0 })
}

fn items(text: &str) -> Vec<Item> {
    let item = json!({"type": "message", "id": "msg_1", "status": "completed", "role": "user",
        "content": [{"type": "input_text", "text": text}]});
    vec![serde_json::from_value(item).unwrap()]
}

fn config(folder: Option<&Path>) -> StoreConfig {
    StoreConfig { entries_max: 3, bytes_max: 10_000, folder: folder.map(Path::to_owned) }
}

#[test]
fn what_was_put_is_there_until_it_is_removed_in_memory_and_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    for folder in [None, Some(folder.path())] {
        let store = Store::open(&config(folder)).unwrap();
        let (id, record) = conversation(&store, items("a"));
        assert_eq!(store.get::<ConversationRecord>(id).unwrap(), None);
        store.put(&record).unwrap();
        assert_eq!(store.get::<ConversationRecord>(id).unwrap(), Some(record));
        let changed = store.change(id, |record| record.items.extend(items("b"))).unwrap();
        assert_eq!(changed, Some(()));
        assert_eq!(store.get::<ConversationRecord>(id).unwrap().unwrap().items.len(), 2);
        assert!(store.get::<ResponseRecord>(id.owner(Kind::Response)).unwrap().is_none());
        assert!(store.remove(id) && !store.remove(id));
        assert_eq!(store.get::<ConversationRecord>(id).unwrap(), None);
        assert_eq!(store.change(id, |_| ()).unwrap(), None);
    }
}

#[test]
fn names_are_the_keepers_and_never_twice_the_same() {
    let store = Store::open(&config(None)).unwrap();
    let names: std::collections::BTreeSet<String> =
        (0..1000).map(|_| store.name(Kind::Response).to_string()).collect();
    assert_eq!(names.len(), 1000);
    let keeper = format!("resp_{:016x}", store.keeper());
    assert!(names.iter().all(|name| name.starts_with(&keeper)));
    assert_ne!(Store::open(&config(None)).unwrap().keeper(), store.keeper());
}

#[test]
fn a_directory_outlives_the_process_with_its_number_and_its_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(folder.path()))).unwrap();
    let keeper = store.keeper();
    let kept: Vec<Id> = (0..5)
        .map(|number| {
            let (id, record) = conversation(&store, items(&number.to_string()));
            store.put(&record).unwrap();
            id
        })
        .collect();
    drop(store);
    // What a server leaves that dies while it writes, and what is somebody else's.
    std::fs::write(folder.path().join("unfinished-x"), "half").unwrap();
    std::fs::write(folder.path().join("notes.json"), "{}").unwrap();
    let store = Store::open(&config(Some(folder.path()))).unwrap();
    assert_eq!(store.keeper(), keeper);
    let there: Vec<bool> =
        kept.iter().map(|&id| store.get::<ConversationRecord>(id).unwrap().is_some()).collect();
    assert_eq!(there, [false, false, true, true, true]);
    let mut names: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 5, "three, the number, and what is somebody else's: {names:?}");
    drop(store);
    let fewer = StoreConfig { entries_max: 1, ..config(Some(folder.path())) };
    let store = Store::open(&fewer).unwrap();
    assert!(store.get::<ConversationRecord>(kept[3]).unwrap().is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
}

#[test]
fn a_directory_has_one_server_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(folder.path()))).unwrap();
    assert!(matches!(Store::open(&config(Some(folder.path()))), Err(Error::Taken(_))));
    drop(store);
    Store::open(&config(Some(folder.path()))).unwrap();
}

#[test]
fn what_is_larger_than_everything_may_be_is_refused_and_what_is_damaged_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&config(Some(folder.path()))).unwrap();
    let (id, record) = conversation(&store, items(&"x".repeat(20_000)));
    assert!(matches!(store.put(&record), Err(Error::TooLarge { .. })));
    assert_eq!(store.get::<ConversationRecord>(id).unwrap(), None);
    let (id, record) = conversation(&store, items("x"));
    store.put(&record).unwrap();
    std::fs::write(folder.path().join(format!("{id}.json")), "\n{").unwrap();
    assert!(matches!(store.get::<ConversationRecord>(id), Err(Error::Damaged { .. })));
}

#[test]
fn what_could_not_be_read_again_is_refused() {
    let store = Store::open(&config(None)).unwrap();
    for (nested, is_kept) in [(120, true), (200, false)] {
        let (id, mut record) = conversation(&store, Vec::new());
        record.conversation.metadata.insert("text \\\"[[[".to_owned(), json!("[".repeat(500)));
        let mut value = json!(1);
        for _ in 0..nested {
            value = json!([value]);
        }
        record.conversation.metadata.insert("deep".to_owned(), value);
        assert_eq!(store.put(&record).is_ok(), is_kept, "{nested}");
        assert_eq!(store.get::<ConversationRecord>(id).unwrap().is_some(), is_kept);
    }
}
