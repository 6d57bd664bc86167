//! Checks that no function packs several arguments into one tuple or array parameter, which hides the number of
//! arguments. Arguments that belong together must be a struct with named fields.

use syn::visit::{self, Visit};

use super::{Finding, syntax::RustFile};

/// In the signatures of named functions, finds parameters that are tuples, or that destructure a tuple or an array.
/// Closures and trait implementations are exempt, because their callers or traits determine their signatures.
#[must_use]
pub fn packed_parameters(file: &RustFile) -> Vec<Finding> {
    let mut parameters = Parameters { path: &file.path, findings: Vec::new() };
    parameters.visit_file(&file.syntax);
    parameters.findings
}

struct Parameters<'a> {
    path: &'a str,
    findings: Vec<Finding>,
}

impl Parameters<'_> {
    fn check(&mut self, signature: &syn::Signature) {
        for input in &signature.inputs {
            let syn::FnArg::Typed(parameter) = input else { continue };
            let is_unpacked = matches!(&*parameter.pat, syn::Pat::Tuple(_) | syn::Pat::Slice(_));
            if is_unpacked || is_tuple(&parameter.ty) {
                let name = &signature.ident;
                let message = format!("{name} packs arguments into one parameter; use a struct");
                self.findings.push(Finding::new(self.path, message));
            }
        }
    }
}

impl<'ast> Visit<'ast> for Parameters<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.check(&item.sig);
        visit::visit_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if item.trait_.is_none() {
            for member in &item.items {
                if let syn::ImplItem::Fn(method) = member {
                    self.check(&method.sig);
                }
            }
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.check(&item.sig);
        visit::visit_trait_item_fn(self, item);
    }
}

/// Whether a type is a tuple of at least two types, perhaps behind references or in an `Option`.
fn is_tuple(kind: &syn::Type) -> bool {
    match kind {
        syn::Type::Path(path) => path.path.segments.last().is_some_and(|segment| {
            segment.ident == "Option"
                && matches!(&segment.arguments, syn::PathArguments::AngleBracketed(arguments)
                if arguments.args.iter().any(|argument| {
                    matches!(argument, syn::GenericArgument::Type(inner) if is_tuple(inner))
                }))
        }),
        syn::Type::Tuple(tuple) => tuple.elems.len() > 1,
        syn::Type::Reference(reference) => is_tuple(&reference.elem),
        syn::Type::Paren(inner) => is_tuple(&inner.elem),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn messages(text: &str) -> Vec<String> {
        let file = RustFile::parse("a", &File::new("a/src/lib.rs", text)).unwrap();
        packed_parameters(&file).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn finds_packed_parameters_of_functions_methods_and_trait_methods() {
        let message = "f packs arguments into one parameter; use a struct";
        assert_eq!(messages("fn f(x: u8, (a, b): (u8, u8)) {}"), [message]);
        assert_eq!(messages("fn f(pair: &(u8, u8)) {}"), [message]);
        assert_eq!(messages("fn f([a, b]: [u8; 2]) {}"), [message]);
        assert_eq!(messages("impl S { fn f(&self, pair: (u8, u8)) {} }"), [message]);
        assert_eq!(messages("trait T { fn f(&self, pair: (u8, u8)); }"), [message]);
        assert_eq!(messages("fn f(pair: Option<&(u8, u8)>) {}"), [message]);
        assert_eq!(messages("fn outer() { fn f(pair: (u8, u8)) {} }"), [message]);
    }

    #[test]
    fn closures_implementations_of_traits_and_lists_of_pairs_are_allowed() {
        assert_eq!(messages("fn f(x: &[(u8, u8)]) { x.iter().map(|(a, b)| a + b).sum() }"), [""; 0]);
        assert_eq!(messages("impl From<(u8, u8)> for S { fn from((a, b): (u8, u8)) -> S { S } }"), [""; 0]);
        assert_eq!(messages("fn f(unit: (), S { a, b }: S) {}"), [""; 0]);
    }
}
