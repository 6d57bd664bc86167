//! The types that the values of a JSON schema may have.

use serde_json::Value;

/// A set of types of JSON Schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TypeSet(u8);

impl TypeSet {
    const EMPTY: Self = Self(0);
    const STRING: Self = Self(1);
    const BOOLEAN: Self = Self(2);
    const NULL: Self = Self(4);
    const ARRAY: Self = Self(8);
    pub(super) const OBJECT: Self = Self(16);
    const INTEGER: Self = Self(32);
    /// Integers and all other numbers.
    const NUMBER: Self = Self(32 + 64);
    pub(super) const ALL: Self = Self(127);

    const NAMES: [(&'static str, Self); 7] = [
        ("string", Self::STRING),
        ("boolean", Self::BOOLEAN),
        ("null", Self::NULL),
        ("array", Self::ARRAY),
        ("object", Self::OBJECT),
        ("integer", Self::INTEGER),
        ("number", Self::NUMBER),
    ];

    /// The keywords that constrain only the values of one type.
    const KEYWORDS: [(Self, &'static [&'static str]); 4] = [
        (Self::STRING, &["minLength", "maxLength", "pattern", "format"]),
        (Self::NUMBER, &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
        (
            Self::ARRAY,
            &["items", "prefixItems", "unevaluatedItems", "contains", "minItems", "maxItems", "uniqueItems"],
        ),
        (
            Self::OBJECT,
            &[
                "properties",
                "patternProperties",
                "additionalProperties",
                "unevaluatedProperties",
                "propertyNames",
                "required",
                "minProperties",
                "maxProperties",
                "dependentRequired",
                "dependentSchemas",
                "dependencies",
            ],
        ),
    ];

    /// Returns the set with the type of this name.
    pub(super) fn named(name: &str) -> Self {
        Self::NAMES.iter().find(|(known, _)| *known == name).map_or(Self::EMPTY, |(_, types)| *types)
    }

    /// Returns the types that the keyword `type` of a schema allows: all types if the schema does not have this keyword.
    pub(super) fn declared(schema: &Value) -> Self {
        match schema.get("type") {
            Some(Value::String(name)) => Self::named(name),
            Some(Value::Array(names)) => {
                let types = names.iter().filter_map(Value::as_str).map(Self::named);
                types.fold(Self::EMPTY, Self::union)
            }
            _ => Self::ALL,
        }
    }

    /// Returns the types whose values are constrained by keywords other than `type`.
    pub(super) fn implied(schema: &Value) -> Self {
        let has_any = |keywords: &[&str]| keywords.iter().any(|keyword| schema.get(*keyword).is_some());
        let implied = Self::KEYWORDS.into_iter().filter(|(_, keywords)| has_any(keywords));
        implied.fold(Self::EMPTY, |all, (types, _)| all.union(types))
    }

    /// Returns the smallest set that contains the type of a value.
    pub(super) fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(number) if number.as_f64().is_some_and(|number| number.fract() == 0.0) => {
                Self::INTEGER
            }
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// Returns the names of the types, without `integer` if the set contains all numbers.
    pub(super) fn names(self) -> impl Iterator<Item = &'static str> {
        let is_named = move |types: Self| {
            self.contains(types) && !(types == Self::INTEGER && self.contains(Self::NUMBER))
        };
        Self::NAMES.into_iter().filter(move |(_, types)| is_named(*types)).map(|(name, _)| name)
    }

    /// Returns the keywords that constrain only the values of one of the types.
    pub(super) fn keywords(self) -> impl Iterator<Item = &'static str> {
        let of_types = Self::KEYWORDS.into_iter().filter(move |(types, _)| self.0 & types.0 != 0);
        of_types.flat_map(|(_, keywords)| keywords.iter().copied())
    }

    pub(super) fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }
}
