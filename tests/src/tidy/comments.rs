//! Checks that the doc comments of public items are at least a clause, so that a reader who sees only the comment
//! knows what the item is.

use syn::visit::{self, Visit};

use super::{Finding, syntax::RustFile};

/// The minimum number of words of the first paragraph of a doc comment.
const WORDS_MIN: usize = 4;

/// Words that begin a fragment, which only the name of the item would complete.
const FRAGMENT_STARTS: [&str; 11] =
    ["And", "As", "By", "Of", "So", "Than", "Which", "Who", "Whom", "Whose", "With"];

/// Finds public items, fields and variants whose doc comments are not a clause. The compiler checks that comments
/// exist (`missing_docs`).
#[must_use]
pub fn doc_comments(file: &RustFile) -> Vec<Finding> {
    let mut comments = Comments { path: &file.path, findings: Vec::new() };
    if file.module.is_some() {
        comments.visit_file(&file.syntax);
    }
    comments.findings
}

struct Comments<'a> {
    path: &'a str,
    findings: Vec<Finding>,
}

impl Comments<'_> {
    fn check(&mut self, attributes: &[syn::Attribute], name: &syn::Ident) {
        let Some(paragraph) = first_paragraph(attributes) else { return };
        if let Some(objection) = objection(&paragraph) {
            let message =
                format!("the first paragraph of the doc comment of {name} {objection}: {paragraph:?}");
            self.findings.push(Finding::new(self.path, message));
        }
    }

    fn check_public(
        &mut self,
        visibility: &syn::Visibility,
        attributes: &[syn::Attribute],
        name: &syn::Ident,
    ) {
        if matches!(visibility, syn::Visibility::Public(_)) {
            self.check(attributes, name);
        }
    }

    fn check_fields(&mut self, fields: &syn::Fields) {
        for field in fields {
            if let Some(name) = &field.ident {
                self.check(&field.attrs, name);
            }
        }
    }
}

impl<'ast> Visit<'ast> for Comments<'_> {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
        for field in &item.fields {
            if let Some(name) = &field.ident {
                self.check_public(&field.vis, &field.attrs, name);
            }
        }
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
        if matches!(item.vis, syn::Visibility::Public(_)) {
            for variant in &item.variants {
                self.check(&variant.attrs, &variant.ident);
                self.check_fields(&variant.fields);
            }
        }
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
        if matches!(item.vis, syn::Visibility::Public(_)) {
            visit::visit_item_trait(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.check(&item.attrs, &item.sig.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check_public(&item.vis, &item.attrs, &item.sig.ident);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
        visit::visit_item_mod(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.check_public(&item.vis, &item.attrs, &item.sig.ident);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.check_public(&item.vis, &item.attrs, &item.ident);
    }
}

/// The first paragraph of a doc comment, as one line.
fn first_paragraph(attributes: &[syn::Attribute]) -> Option<String> {
    let mut lines = Vec::new();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("doc")) {
        let syn::Meta::NameValue(syn::MetaNameValue { value, .. }) = &attribute.meta else { continue };
        let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = value else { continue };
        lines.push(text.value());
    }
    let paragraph: Vec<&str> = lines
        .iter()
        .map(|line| line.trim())
        .skip_while(|line| line.is_empty())
        .take_while(|line| !line.is_empty())
        .collect();
    (!paragraph.is_empty()).then(|| paragraph.join(" "))
}

/// Returns the objection to the first paragraph of a doc comment, if any.
fn objection(paragraph: &str) -> Option<String> {
    let words: Vec<&str> =
        paragraph.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).collect();
    if words.len() < WORDS_MIN {
        return Some(format!("has fewer than {WORDS_MIN} words"));
    }
    let first = words[0].trim_matches(|letter: char| !letter.is_alphanumeric());
    FRAGMENT_STARTS.contains(&first).then(|| format!("is a fragment that begins with {first:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn messages(text: &str) -> Vec<String> {
        let file = RustFile::parse("a", &File::new("a/src/lib.rs", text)).unwrap();
        doc_comments(&file).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn finds_comments_that_are_too_short() {
        let short = "the first paragraph of the doc comment of f has fewer than 4 words: \"By whom.\"";
        assert_eq!(messages("/// By whom.\npub fn f() {}"), [short]);
        assert_eq!(messages("impl S {\n/// By whom.\npub fn f() {}\n}"), [short]);
        assert_eq!(messages("pub trait T {\n/// By whom.\nfn f();\n}"), [short]);
        assert_eq!(messages("pub struct S {\n/// By whom.\npub f: u8 }"), [short]);
        assert_eq!(messages("pub enum E { V {\n/// By whom.\nf: u8 } }"), [short]);
        assert_eq!(messages("pub mod m {\n/// By whom.\npub const f: u8 = 1; }"), [short]);
    }

    #[test]
    fn finds_fragments() {
        let fragment = "is a fragment that begins with \"Of\"";
        let text = "/// Of the prompt and the answer.\npub type A = u8;";
        let expected = format!(
            "the first paragraph of the doc comment of A {fragment}: \"Of the prompt and the answer.\""
        );
        assert_eq!(messages(text), [expected]);
    }

    #[test]
    fn clauses_private_items_and_items_without_comments_are_allowed() {
        let text = "/// The field manager that last applied this object.\n///\n/// More.\npub struct S {\n\
                    /// Short.\nprivate: u8 }\n/// Short.\nfn f() {}\npub fn g() {}\n/// Short.\npub(crate) fn h() {}";
        assert_eq!(messages(text), [""; 0]);
    }
}
