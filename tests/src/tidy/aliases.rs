//! Checks that no import renames a type of this workspace because the file also uses another type of the workspace with
//! the same name. One of the two types needs another name instead.

use std::collections::HashSet;

use syn::visit::{self, Visit};

use super::{
    Finding,
    manifests::is_crate,
    syntax::{RustFile, type_name},
};

/// Finds imports that rename a type of the workspace in a file that also imports or defines another type of the
/// workspace with the same name.
#[must_use]
pub fn colliding_aliases(file: &RustFile) -> Vec<Finding> {
    let mut names = TypeNames::default();
    names.visit_file(&file.syntax);
    let TypeNames { aliases, known } = names;
    let finding = |alias: Alias| {
        let Alias { name, alias } = alias;
        let message = format!(
            "imports {name} as {alias} and also uses another {name} of this workspace; rename one type"
        );
        Finding::new(&file.path, message)
    };
    aliases.into_iter().filter(|alias| known.contains(&alias.name)).map(finding).collect()
}

struct Alias {
    name: String,
    alias: String,
}

/// The names by which a file refers to types of the workspace.
#[derive(Default)]
struct TypeNames {
    /// Imports from the workspace that rename a type.
    aliases: Vec<Alias>,
    /// The types that the file defines, or imports from the workspace by their own names.
    known: HashSet<String>,
}

impl TypeNames {
    fn add_import(&mut self, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => self.add_import(&path.tree),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_import(tree)),
            syn::UseTree::Name(name) => drop(self.known.insert(name.ident.to_string())),
            syn::UseTree::Rename(rename) => {
                let (name, alias) = (rename.ident.to_string(), rename.rename.to_string());
                if alias != "_" && name.starts_with(char::is_uppercase) {
                    self.aliases.push(Alias { name, alias });
                }
            }
            syn::UseTree::Glob(_) => {}
        }
    }
}

impl<'ast> Visit<'ast> for TypeNames {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        self.known.extend(type_name(item).map(ToString::to_string));
        visit::visit_item(self, item);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if let syn::UseTree::Path(path) = &item.tree {
            let root = path.ident.to_string();
            if matches!(root.as_str(), "crate" | "self" | "super") || is_crate(&root.replace('_', "-")) {
                self.add_import(&item.tree);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn messages(text: &str) -> Vec<String> {
        let file = RustFile::parse("a", &File::new("a/src/lib.rs", text)).unwrap();
        colliding_aliases(&file).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn finds_aliases_beside_another_type_of_ours() {
        let message = "imports Delta as Other and also uses another Delta of this workspace; rename one type";
        assert_eq!(messages("use server_parsers::{Delta as Other}; use super::delta::Delta;"), [message]);
        assert_eq!(messages("use crate::a::{Delta as Other, b}; struct Delta;"), [message]);
    }

    #[test]
    fn aliases_beside_types_of_others_are_allowed() {
        assert_eq!(messages("use crate::a::Response as WireResponse; use axum::Response;"), [""; 0]);
        assert_eq!(messages("use clap::Args as ClapArgs; struct Args;"), [""; 0]);
        assert_eq!(messages("use crate::a::Trait as _; struct Trait;"), [""; 0]);
    }
}
