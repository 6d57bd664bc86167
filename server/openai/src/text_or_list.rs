//! Values that are a string or a list.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};

/// A string, or a list of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextOrList<T> {
    /// The value is a string.
    Text(String),
    /// The value is a list.
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOrList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer, "a string or an array of objects")
    }
}

/// Deserializes a string or a list. Error messages contain `expected` as the description of the allowed values.
pub(crate) fn text_or_list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
    expected: &'static str,
) -> Result<TextOrList<T>, D::Error> {
    deserializer.deserialize_any(TextOrListVisitor { expected, element: PhantomData })
}

struct TextOrListVisitor<T> {
    expected: &'static str,
    element: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for TextOrListVisitor<T> {
    type Value = TextOrList<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<TextOrList<T>, E> {
        Ok(TextOrList::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<TextOrList<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            list.push(element);
        }
        Ok(TextOrList::List(list))
    }
}
