//! Checks that type names are nouns with content, and not bare participles, pronouns or words without a meaning of
//! their own.

use syn::visit::{self, Visit};

use super::{
    Finding,
    syntax::{RustFile, type_name},
};

/// Words that do not describe a type on their own.
const EMPTY_WORDS: [&str; 58] = [
    "All",
    "Any",
    "Anything",
    "Both",
    "Each",
    "Either",
    "Every",
    "Everything",
    "Extra",
    "Extras",
    "Facts",
    "He",
    "Helper",
    "Her",
    "Here",
    "His",
    "How",
    "Info",
    "It",
    "Its",
    "Itself",
    "Later",
    "Live",
    "Manager",
    "Mine",
    "Neither",
    "None",
    "Nothing",
    "Now",
    "One",
    "Other",
    "Others",
    "Ours",
    "Own",
    "Place",
    "Same",
    "Self",
    "She",
    "Some",
    "Something",
    "Stuff",
    "Such",
    "That",
    "Them",
    "Then",
    "There",
    "These",
    "They",
    "Thing",
    "Things",
    "This",
    "Those",
    "Util",
    "What",
    "Where",
    "Which",
    "Who",
    "Wish",
];

/// Participles that end with neither "ed" nor "ing".
const IRREGULAR_PARTICIPLES: [&str; 52] = [
    "Begun",
    "Bound",
    "Broken",
    "Brought",
    "Built",
    "Caught",
    "Chosen",
    "Come",
    "Cut",
    "Done",
    "Drawn",
    "Driven",
    "Fallen",
    "Felt",
    "Forgotten",
    "Found",
    "Given",
    "Gone",
    "Gotten",
    "Grown",
    "Heard",
    "Held",
    "Hidden",
    "Kept",
    "Known",
    "Laid",
    "Left",
    "Lent",
    "Lost",
    "Made",
    "Meant",
    "Met",
    "Paid",
    "Put",
    "Read",
    "Said",
    "Seen",
    "Sent",
    "Shown",
    "Spent",
    "Spoken",
    "Stolen",
    "Sworn",
    "Taken",
    "Taught",
    "Thought",
    "Thrown",
    "Told",
    "Torn",
    "Won",
    "Worn",
    "Written",
];

/// Nouns that end with "ed" or "ing".
const NOUNS: [&str; 30] = [
    "Binding",
    "Building",
    "Ceiling",
    "Embed",
    "Embedding",
    "Encoding",
    "Ending",
    "Escaping",
    "Feed",
    "Finding",
    "Heading",
    "Listing",
    "Logging",
    "Mapping",
    "Meaning",
    "Need",
    "Padding",
    "Pricing",
    "Ranking",
    "Reasoning",
    "Ring",
    "Routing",
    "Sampling",
    "Scheduling",
    "Seed",
    "Setting",
    "Speed",
    "String",
    "Tracing",
    "Warning",
];

/// Finds type definitions and renaming imports (`use … as …`) that introduce a banned name.
#[must_use]
pub fn type_names(file: &RustFile) -> Vec<Finding> {
    let mut names = TypeNames { path: &file.path, findings: Vec::new() };
    names.visit_file(&file.syntax);
    names.findings
}

struct TypeNames<'a> {
    path: &'a str,
    findings: Vec<Finding>,
}

impl TypeNames<'_> {
    fn check(&mut self, name: &syn::Ident) {
        if let Some(objection) = objection(&name.to_string()) {
            let message = format!("the type name {name} is {objection}; use a noun with content");
            self.findings.push(Finding::new(self.path, message));
        }
    }
}

impl<'ast> Visit<'ast> for TypeNames<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if let Some(name) = type_name(item) {
            self.check(name);
        }
        visit::visit_item(self, item);
    }

    fn visit_use_rename(&mut self, rename: &'ast syn::UseRename) {
        self.check(&rename.rename);
    }
}

/// Returns the reason why a type name is banned; `None` if it is allowed.
fn objection(name: &str) -> Option<&'static str> {
    if EMPTY_WORDS.contains(&name) {
        return Some("a word without content");
    }
    let is_single_word = !name.chars().skip(1).any(char::is_uppercase);
    let is_participle = (name.ends_with("ed") || name.ends_with("ing")) && !NOUNS.contains(&name);
    if is_single_word && (is_participle || IRREGULAR_PARTICIPLES.contains(&name)) {
        return Some("a bare participle");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn messages(text: &str) -> Vec<String> {
        let file = RustFile::parse("a", &File::new("a/src/lib.rs", text)).unwrap();
        type_names(&file).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn finds_banned_names_of_every_kind_of_type() {
        let text = "pub struct Told;\nenum Asked {}\ntrait Reading {}\ntype Place = u8;\nuse a::B as Made;\n\
                    fn f() { struct Then; }";
        assert_eq!(messages(text).len(), 6);
        let message = "the type name Told is a bare participle; use a noun with content";
        assert_eq!(messages("pub struct Told;"), [message]);
    }

    #[test]
    fn nouns_and_compounds_are_allowed() {
        let text = "struct String; struct Speed; struct FoundBlock; enum TokenizedText {} use a::Context as _; \
                    struct Thread; trait Embedding {}";
        assert_eq!(messages(text), [""; 0]);
    }
}
