//! Fuzzes the files of the store's directory with arbitrary bytes. The server must start, each tenant must get only its
//! own records, and data that is added to a damaged record must be readable after a restart. `server/fuzz` runs `check`
//! for hours; the test below runs it for seconds.

#[cfg(test)]
#[path = "../../fuzz/mutations.rs"]
mod mutations;

use std::cell::OnceCell;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use server_openai::responses::{Conversation, Item};
use tempfile::TempDir;

use crate::store::{
    CHAIN_MAX, Error, Id, Kind, NewItems, ResponseRecord, Store, StoreConfig, StoredItem, StoredRecord,
};
use crate::tenant::Tenant;

/// Separates the parts of an input: the file with the ID of the store, and the records.
const SEPARATOR: u8 = 0x1e;
/// The names of the records, in the order of the parts of an input.
const NAMES: [&str; 4] = [
    "conv_000000000000000100000000000000000000000100000000",
    "resp_000000000000000100000000000000000000000200000000",
    "resp_000000000000000100000000000000000000000300000000",
    "conv_000000000000000100000000000000000000000400000000",
];
/// The owner of the records in the seeds.
const TENANT: &str = "0123456789abcdef0123456789abcdef";
/// The limits of the store. The limit in bytes exceeds the size of every input, so that only the limit on the number of
/// records evicts records.
const ENTRIES_MAX: usize = 3;
const BYTES_MAX: u64 = 64 << 10;

thread_local! {
    static DIRECTORY: OnceCell<TempDir> = const { OnceCell::new() };
}

/// The file of a record.
struct RecordFile<'a> {
    id: Id,
    content: &'a [u8],
    /// The tenant that the first line names, if the line is one that a server writes.
    owner: Option<Tenant>,
}

/// The readable content of a record.
#[derive(Debug, PartialEq)]
struct Contents {
    head: Option<Value>,
    items: Vec<Option<(String, Option<Item>)>>,
    bytes: u64,
}

/// Writes the files in `input`, and panics if the store violates the requirements in this module's documentation.
pub(crate) fn check(input: &[u8]) {
    DIRECTORY.with(|directory| {
        let directory = directory.get_or_init(|| TempDir::new().expect("a temporary directory")).path();
        for entry in fs::read_dir(directory).expect("the directory can be listed") {
            fs::remove_file(entry.expect("the directory can be listed").path())
                .expect("only files are there");
        }
        let mut parts = input.split(|byte| *byte == SEPARATOR);
        let number = parts.next().unwrap_or_default();
        fs::write(directory.join("keeper"), number).expect("room for a small file");
        let files: Vec<_> = NAMES.iter().zip(parts).map(|(name, part)| RecordFile::new(name, part)).collect();
        for file in &files {
            let path = directory.join(format!("{}.record", file.id));
            fs::write(path, file.content).expect("room for a small file");
        }
        check_directory(directory, &files);
    });
}

fn check_directory(directory: &Path, files: &[RecordFile<'_>]) {
    let config = StoreConfig {
        max_stored_responses: ENTRIES_MAX,
        max_stored_bytes: BYTES_MAX,
        response_store_dir: Some(directory.to_owned()),
    };
    let open = || Store::open(&config).expect("damaged files do not prevent a server from starting");
    let store = open();
    let number = store.store_id();
    assert_ne!(number, 0);
    assert!(records(directory) <= ENTRIES_MAX);
    for file in files {
        for tenant in tenants(files) {
            check_record(&store, files, file, tenant);
        }
    }
    let before = everything(&store, files);
    drop(store);
    let store = open();
    assert_eq!(store.store_id(), number, "the ID of the store remains the same");
    assert_eq!(everything(&store, files), before, "a restart changes nothing");
    assert!(records(directory) <= ENTRIES_MAX);
}

/// Checks what a tenant can read and change in a file.
fn check_record(store: &Store, files: &[RecordFile<'_>], file: &RecordFile<'_>, tenant: Tenant) {
    let id = file.id;
    let found = store.get(id, tenant).expect("the file can be read");
    let is_owner = file.owner == Some(tenant);
    assert!(found.is_none() || is_owner, "{id} is shown to {tenant}");
    assert!(found.is_some() || !is_owner || files.len() > ENTRIES_MAX, "{id} is lost");
    let Some(stored) = found else {
        let never = |_: &StoredRecord| -> Result<NewItems, Error> { panic!("{id} is changed by {tenant}") };
        assert!(matches!(store.append(id, tenant, never), Ok(None)));
        assert!(!store.remove(id, tenant) && store.chain(id, tenant).is_err());
        return;
    };
    assert!(stored.bytes() <= file.content.len() as u64);
    let lines = file.content.iter().filter(|byte| **byte == b'\n').count();
    let contents = Contents::of(&stored);
    assert!(contents.items.len() <= lines && stored.events().count() <= lines);
    assert!(stored.output().filter_map(|item| item.ok()?.parse().ok()).count() <= lines);
    if let Ok(chain) = store.chain(id, tenant) {
        assert!(chain.first() == Some(&id) && chain.len() <= CHAIN_MAX.min(files.len()));
        let is_own = |id: &Id| files.iter().any(|file| file.id == *id && file.owner == Some(tenant));
        assert!(chain.iter().all(is_own), "{tenant} is shown {chain:?}");
    }
    match id.kind() {
        Kind::Conversation => change(store, id, tenant, contents),
        _ => replace(store, id, tenant, &stored),
    }
}

/// Adds an item to a conversation, replaces its head, and removes its first item.
fn change(store: &Store, id: Id, tenant: Tenant, before: Contents) {
    let read = || {
        Contents::of(&store.get(id, tenant).expect("the record can be read").expect("the record is stored"))
    };
    let item = item();
    let add = |stored: &StoredRecord| {
        let counts = stored.counts();
        assert_eq!(counts.items, before.items.len());
        let generated_ids = counts.generated_ids.saturating_add(1);
        Ok::<_, Error>(NewItems { items: vec![Arc::clone(&item)], generated_ids })
    };
    let added = store
        .append(id, tenant, add)
        .expect("the conversation has room")
        .expect("the conversation is stored");
    assert_eq!(added.len(), 1);
    let mut expected = before.items;
    expected.push(Some((item.id().to_owned(), Some((*item).clone()))));
    let after = read();
    assert_eq!((&after.head, &after.items), (&before.head, &expected));

    let head = |stored: &StoredRecord| match stored.head::<Conversation>() {
        Ok(mut head) => {
            head.created_at = 7;
            Ok(head)
        }
        Err(_) => Err(Error::TooDeep),
    };
    if let Ok(changed) = store.set_head::<Error>(id, tenant, head) {
        let after = read();
        let changed = serde_json::to_value(changed.expect("the conversation is stored"))
            .expect("a conversation is JSON");
        assert_eq!((&after.head, &after.items), (&Some(changed), &expected));
    }

    let removed =
        store.remove_item(id, tenant, |_| Ok::<_, Error>((0, ()))).expect("the conversation can be written");
    assert_eq!(removed, Some(()));
    expected.remove(0);
    assert_eq!(read().items, expected);
}

/// Stores a response again, with another input.
fn replace(store: &Store, id: Id, tenant: Tenant, stored: &StoredRecord) {
    let Ok(mut response) = stored.response() else { return };
    response.id = id.to_string();
    let record = ResponseRecord { response, input: vec![item()], events: None };
    store.put_response(record, tenant).expect("the response can be stored");
    let after = store.get(id, tenant).expect("the record can be read").expect("the record is stored");
    assert_eq!(after.response().expect("this server wrote the response").id, id.to_string());
    assert_eq!(Contents::of(&after).items.len(), 1);
}

impl<'a> RecordFile<'a> {
    fn new(name: &str, content: &'a [u8]) -> Self {
        Self { id: Id::parse(name).expect("a name"), content, owner: owner(content) }
    }
}

/// Returns the tenant that the first line names, if the line is one that a server writes: `NUMBER TENANT PREVIOUS`.
fn owner(content: &[u8]) -> Option<Tenant> {
    let end = content.iter().position(|byte| *byte == b'\n')?;
    let line = std::str::from_utf8(&content[..end]).ok()?;
    let [number, tenant, previous] = line.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let is_number = number == "0" || number.starts_with(|digit: char| ('1'..='9').contains(&digit));
    let is_number = is_number && number.bytes().all(|byte| byte.is_ascii_digit());
    let is_number = is_number && number.parse().is_ok_and(|number: u64| number < 1 << 63);
    let is_key = previous.is_empty() || Id::parse(previous).is_some_and(|id| id.kind() != Kind::Item);
    let is_sound = is_number && is_key && !tenant.contains(|letter: char| letter.is_ascii_uppercase());
    match tenant {
        _ if !is_sound => None,
        "-" => Some(Tenant::default()),
        tenant => Tenant::parse(tenant),
    }
}

/// Returns the default tenant, the owner of the records in the seeds, [`Tenant::NOBODY`], and all other owners of these
/// files.
fn tenants(files: &[RecordFile<'_>]) -> Vec<Tenant> {
    let mut tenants = vec![Tenant::default(), Tenant::parse(TENANT).expect("a tenant"), Tenant::NOBODY];
    for owner in files.iter().filter_map(|file| file.owner) {
        if !tenants.contains(&owner) {
            tenants.push(owner);
        }
    }
    tenants
}

impl Contents {
    fn of(stored: &StoredRecord) -> Self {
        let item = |item: StoredItem<'_>| (item.id.clone(), item.parse().ok());
        let items: Vec<_> = stored.input().map(|read| read.ok().map(item)).collect();
        assert_eq!(stored.counts().items, items.len());
        Self { head: stored.head().ok(), items, bytes: stored.bytes() }
    }
}

/// Returns all records as each tenant sees them.
fn everything(store: &Store, files: &[RecordFile<'_>]) -> Vec<Option<Contents>> {
    let tenants = tenants(files);
    let of =
        |id: Id| tenants.iter().map(move |tenant| store.get(id, *tenant).expect("the record can be read"));
    files.iter().flat_map(|file| of(file.id)).map(|stored| stored.as_ref().map(Contents::of)).collect()
}

/// Returns the number of records in the directory.
fn records(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).expect("the directory can be listed").map_while(Result::ok);
    entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "record")).count()
}

fn item() -> Arc<Item> {
    let item = serde_json::json!({"type": "message", "id": "msg_1", "status": "completed", "role": "user",
        "content": [{"type": "input_text", "text": "added"}]});
    Arc::new(serde_json::from_value(item).expect("an item"))
}

#[cfg(test)]
mod tests {
    use super::check;
    use super::mutations::{check_mutations, seeds};

    const CASES: u64 = 2_000;

    #[test]
    fn any_bytes_in_the_files_of_the_store_are_harmless() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/store");
        check_mutations(CASES, &seeds(directory), include_str!("../../fuzz/dictionaries/store.dict"), check);
    }
}
