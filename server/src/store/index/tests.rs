use std::collections::BTreeSet;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::super::id::{Id, Kind};
use super::*;

fn key(number: u128) -> Key {
    Id::new(Kind::Response, 1, number).key()
}

fn tenant(number: u32) -> Tenant {
    Tenant::parse(&format!("{number:032x}")).unwrap_or_default()
}

fn entry(bytes: u64, previous: Option<Key>) -> Entry {
    Entry { tenant: Tenant::default(), previous, bytes, data: None }
}

fn index(entries_max: usize, bytes_max: u64) -> Index {
    Index::new(Bounds { entries_max, bytes_max })
}

impl Index {
    fn check_invariants(&self) {
        assert!(self.records.len() <= self.bounds.entries_max && self.bytes <= self.bounds.bytes_max);
        assert_eq!(self.bytes, self.records.values().map(|record| record.entry.bytes).sum::<u64>());
        let mut followers: HashMap<Key, usize> = HashMap::new();
        for previous in self.records.values().filter_map(|record| record.entry.previous) {
            *followers.entry(previous).or_insert(0) += 1;
        }
        assert_eq!(self.followers, followers);
        let leaves: BTreeSet<(u64, Key)> = self.leaves.iter().map(|(used, key)| (*used, *key)).collect();
        let unfollowed = self.records.iter().filter(|(key, _)| !followers.contains_key(key));
        assert_eq!(leaves, unfollowed.map(|(key, record)| (record.used, *key)).collect());
    }

    fn is_stored(&mut self, number: u128) -> bool {
        self.get(key(number), Tenant::default()).is_some()
    }
}

#[test]
fn the_least_recently_used_record_is_evicted_first() {
    let mut index = index(2, 100);
    assert_eq!(index.insert(key(1), entry(10, None)), []);
    assert_eq!(index.insert(key(2), entry(10, None)), []);
    assert!(index.is_stored(1));
    assert_eq!(index.insert(key(3), entry(10, None)), [key(2)]);
    assert_eq!(index.insert(key(4), entry(95, None)), [key(1), key(3)]);
    assert_eq!((index.bytes, index.records.len()), (95, 1));
    assert_eq!(index.insert(key(4), entry(1, None)), [], "the entry is replaced, not added");
    assert_eq!(index.bytes, 1);
}

#[test]
fn the_end_of_a_chain_is_evicted_before_its_beginning() {
    let mut index = index(3, 100);
    index.insert(key(1), entry(1, None));
    index.insert(key(2), entry(1, Some(key(1))));
    index.insert(key(3), entry(1, Some(key(2))));
    assert_eq!(index.insert(key(4), entry(1, None)), [key(3)]);
    index.check_invariants();
    // A use of a record also protects the records that it follows, because a record is evicted only after its
    // followers.
    assert!(index.is_stored(2));
    assert_eq!(index.insert(key(5), entry(1, None)), [key(4)]);
    index.check_invariants();
}

#[test]
fn a_record_that_becomes_a_leaf_counts_as_used_when_its_follower_was() {
    let mut index = index(3, 100);
    index.insert(key(1), entry(1, None));
    index.insert(key(2), entry(1, None));
    index.insert(key(3), entry(1, Some(key(1))));
    assert!(index.remove(key(3), Tenant::default()));
    index.insert(key(4), entry(1, None));
    assert_eq!(index.insert(key(5), entry(1, None)), [key(2)], "1 was in use until 3 was removed");
    index.check_invariants();
}

#[test]
fn records_in_a_cycle_are_evicted_too() {
    let mut index = index(2, 100);
    index.insert(key(1), entry(1, Some(key(2))));
    index.insert(key(2), entry(1, Some(key(1))));
    assert_eq!(index.chain(key(1), Tenant::default()), Err(ChainError::TooLong));
    assert_eq!(index.insert(key(3), entry(1, Some(key(3)))).len(), 1);
    index.check_invariants();
}

#[test]
fn a_chain_is_listed_latest_first_up_to_a_limit() {
    let mut index = index(2 * CHAIN_MAX, 10_000);
    for number in 1..=CHAIN_MAX as u128 + 1 {
        index.insert(key(number), entry(1, (number > 1).then(|| key(number - 1))));
    }
    let chain = index.chain(key(CHAIN_MAX as u128), Tenant::default()).unwrap();
    assert_eq!((chain.len(), chain[0], chain[CHAIN_MAX - 1]), (CHAIN_MAX, key(CHAIN_MAX as u128), key(1)));
    let longer = index.chain(key(CHAIN_MAX as u128 + 1), Tenant::default());
    assert_eq!(longer, Err(ChainError::TooLong));
    index.remove(key(2), Tenant::default());
    assert_eq!(index.chain(key(4), Tenant::default()), Err(ChainError::Lost(key(2).id())));
}

#[test]
fn no_operation_on_a_record_marks_the_records_that_it_follows_as_used() {
    // If each use marked the whole chain, the number of uses would grow by the length of the chain.
    let mut index = index(2 * CHAIN_MAX, 10_000);
    for number in 1..=CHAIN_MAX as u128 {
        index.insert(key(number), entry(1, (number > 1).then(|| key(number - 1))));
    }
    let before = index.uses;
    assert!(index.is_stored(CHAIN_MAX as u128));
    index.chain(key(CHAIN_MAX as u128), Tenant::default()).unwrap();
    assert_eq!(index.uses - before, 2);
}

#[test]
fn records_of_other_tenants_do_not_exist() {
    let mut index = index(10, 100);
    let of = |owner, previous| Entry { tenant: owner, ..entry(1, previous) };
    index.insert(key(1), of(tenant(1), None));
    index.insert(key(2), of(tenant(2), Some(key(1))));
    for other in [tenant(2), Tenant::default()] {
        assert!(index.get(key(1), other).is_none() && !index.remove(key(1), other));
    }
    assert_eq!(index.chain(key(2), tenant(2)), Err(ChainError::Lost(key(1).id())));
    assert!(index.get(key(1), tenant(1)).is_some() && index.remove(key(1), tenant(1)));
}

#[test]
fn a_store_without_room_stores_nothing() {
    let mut index = index(0, 100);
    assert_eq!(index.insert(key(1), entry(1, None)), [key(1)]);
    assert!(!index.is_stored(1));
}

#[test]
fn the_limits_hold_and_no_record_is_evicted_before_its_followers() {
    let seed = 11;
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut random = |below: u64| rng.random_range(0..below);
    let mut index = index(20, 300);
    for number in 1..5000_u128 {
        let recent = key(number - u128::from(random(20)).min(number));
        let evicted = match random(5) {
            0 => {
                let _ = index.get(key(u128::from(random(5000))), Tenant::default());
                Vec::new()
            }
            1 => {
                index.remove(recent, Tenant::default());
                Vec::new()
            }
            2 => {
                let bytes = random(80);
                index.append(recent, bytes, None).unwrap_or_default()
            }
            _ => {
                // A record follows an earlier record or none, which results in chains and trees.
                let previous = number.saturating_sub(1 + u128::from(random(8)));
                let previous = (random(3) > 0 && previous > 0).then(|| key(previous));
                index.insert(key(number), entry(random(60), previous))
            }
        };
        for evicted in evicted {
            let followers = index.records.values().filter(|record| record.entry.previous == Some(evicted));
            assert_eq!(followers.count(), 0, "{evicted} was evicted before its followers");
        }
        index.check_invariants();
    }
}
