//! The IDs of responses, conversations and items: a prefix, such as `resp_`, and 48 hexadecimal digits. The first 16
//! digits identify the store, the next 24 are random, and the last 8 are the number of an item within its response or
//! conversation (0 for the object itself).
//!
//! From the ID alone, without any shared state, a router determines the replica of an object, and the server determines
//! the owner of an item.

use std::fmt;

/// The kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Response,
    Conversation,
    /// An item of a response or conversation.
    Item,
}

/// The ID of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Id {
    kind: Kind,
    store_id: u64,
    /// The random part of the ID, which has 96 bits.
    random: u128,
    number: u32,
}

/// Number of digits of an ID after its prefix.
const DIGITS: usize = 48;
/// The prefixes of the IDs of stored objects.
const PREFIXES: [(&str, Kind); 2] = [("resp", Kind::Response), ("conv", Kind::Conversation)];
/// The mask of the lower 96 bits.
const RANDOM: u128 = (1 << 96) - 1;

impl Id {
    pub(super) fn new(kind: Kind, store_id: u64, random: u128) -> Self {
        Self { kind, store_id, random: random & RANDOM, number: 0 }
    }

    /// Parses an ID; returns `None` if no server generates such an ID.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (prefix, digits) = text.split_once('_')?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if digits.len() != DIGITS || !digits.bytes().all(is_digit) {
            return None;
        }
        let named = PREFIXES.iter().find(|(known, _)| *known == prefix);
        let kind = named.map_or(Kind::Item, |(_, kind)| *kind);
        let number = u32::from_str_radix(&digits[40..], 16).ok()?;
        if (kind == Kind::Item) != (number > 0) {
            return None;
        }
        Some(Self {
            kind,
            store_id: u64::from_str_radix(&digits[..16], 16).ok()?,
            random: u128::from_str_radix(&digits[16..40], 16).ok()?,
            number,
        })
    }

    pub(crate) fn kind(self) -> Kind {
        self.kind
    }

    /// Returns the ID of the item's owner, which is an object of this kind.
    pub(crate) fn owner(self, kind: Kind) -> Self {
        Self { kind, number: 0, ..self }
    }

    /// Returns the key of the object's record. An item has no record of its own, so call [`Id::owner`] first.
    pub(super) fn key(self) -> Key {
        Key { kind: self.kind, store_id: self.store_id, random: self.random }
    }

    /// Returns the IDs for the items of the object.
    pub(crate) fn items(self) -> ItemIds {
        self.items_after(0)
    }

    /// Returns the IDs for the items of the object, without the first `count` IDs.
    pub(crate) fn items_after(self, count: u32) -> ItemIds {
        ItemIds(Self { number: count, ..self })
    }
}

impl fmt::Display for Id {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix =
            PREFIXES.iter().find(|(_, kind)| *kind == self.kind).map_or("item", |(prefix, _)| prefix);
        write!(formatter, "{prefix}_{}", Digits(self))
    }
}

struct Digits<'a>(&'a Id);

impl fmt::Display for Digits<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Id { store_id, random, number, .. } = self.0;
        write!(formatter, "{store_id:016x}{random:024x}{number:08x}")
    }
}

/// Generates the IDs of items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemIds(Id);

impl ItemIds {
    /// Returns the next ID; `prefix` stands for the kind of the item, such as `msg`.
    pub(crate) fn next(&mut self, prefix: &str) -> String {
        self.0.number = self.0.number.saturating_add(1);
        format!("{prefix}_{}", Digits(&self.0))
    }

    /// Returns the number of item IDs that have been generated for the object.
    pub(crate) fn count(&self) -> u32 {
        self.0.number
    }
}

/// The key of a stored record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    kind: Kind,
    store_id: u64,
    random: u128,
}

impl Key {
    /// Returns the ID of the object that is stored under this key.
    pub(super) fn id(self) -> Id {
        let Self { kind, store_id, random } = self;
        Id { kind, store_id, random, number: 0 }
    }

    /// Parses the format of [`fmt::Display`].
    pub(super) fn parse(text: &str) -> Option<Self> {
        Id::parse(text).filter(|id| id.kind != Kind::Item).map(Id::key)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id().fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_written_and_items_contain_their_owner() {
        let id = Id::new(Kind::Response, 0xabc, u128::MAX);
        assert_eq!(id.to_string(), "resp_0000000000000abcffffffffffffffffffffffff00000000");
        assert_eq!(Id::parse(&id.to_string()), Some(id));
        let mut items = id.items();
        let [first, second] = ["msg", "fc"].map(|prefix| items.next(prefix));
        assert_eq!(first, "msg_0000000000000abcffffffffffffffffffffffff00000001");
        assert_eq!(second, "fc_0000000000000abcffffffffffffffffffffffff00000002");
        let item = Id::parse(&second).unwrap();
        assert_eq!((item.kind(), item.owner(Kind::Response)), (Kind::Item, id));
        assert_eq!(Key::parse(&id.to_string()), Some(id.key()));
        assert_eq!(Key::parse(&second), None);
    }

    #[test]
    fn ids_that_no_server_generates_are_rejected() {
        let good = Id::new(Kind::Conversation, 1, 2).to_string();
        assert!(Id::parse(&good).is_some());
        let wrong = [
            "",
            "resp_",
            "resp",
            &good[..good.len() - 1],
            &format!("{good}0"),
            &good.to_uppercase(),
            &good.replace("conv_0", "conv_+"),
            "resp_../../../../../../../../etc/passwd..............x",
            // The number of an item must not be 0, and that of other objects must be 0.
            &good.replace("conv", "msg"),
            &format!("{}1", &good[..good.len() - 1]),
        ];
        for wrong in wrong {
            assert_eq!(Id::parse(wrong), None, "{wrong}");
        }
    }
}
