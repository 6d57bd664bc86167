//! Rules about Rust files: their names and lengths, module documentation, and the use of `unsafe`.

use proc_macro2::{TokenStream, TokenTree};

use super::{Finding, Tree};

/// Rust files with more lines than this are listed, because they may contain two ideas.
const LONG_FILE_LINES: usize = 700;
/// The maximum length of `main.rs` in lines. The file should only parse arguments, set up the process and call the
/// library.
const MAIN_LINES_MAX: usize = 40;
/// The only crate that may contain `unsafe`.
const UNSAFE_IN: &str = "server/openvino/";

/// Checks the Rust files of the repository.
#[must_use]
pub fn sources(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| file.path.ends_with(".rs")) {
        let name = file.path.rsplit('/').next().unwrap_or_default();
        let lines = file.text.lines().count();
        if file.path.ends_with("src/main.rs") && lines > MAIN_LINES_MAX {
            findings.push(Finding::new(&file.path, format!("{lines} lines (limit: {MAIN_LINES_MAX})")));
        }
        if name == "mod.rs" {
            findings.push(Finding::new(&file.path, "the module is in mod.rs instead of foo.rs next to foo/"));
        }
        // `tests.rs` is the `mod tests` of its parent, which documents what is tested.
        if name != "tests.rs" && !file.text.starts_with("//!") {
            findings.push(Finding::new(&file.path, "does not begin with module documentation (//!)"));
        }
        if !file.path.starts_with(UNSAFE_IN) && file.text.parse::<TokenStream>().is_ok_and(contains_unsafe) {
            findings.push(Finding::new(
                &file.path,
                format!("contains unsafe, which is allowed only in {UNSAFE_IN}"),
            ));
        }
    }
    findings
}

/// Lists the Rust files with more than 700 lines.
#[must_use]
pub fn long_files(tree: &Tree) -> Vec<Finding> {
    let sources = tree.files.iter().filter(|file| file.path.ends_with(".rs"));
    sources
        .map(|file| (file, file.text.lines().count()))
        .filter(|(_, lines)| *lines > LONG_FILE_LINES)
        .map(|(file, lines)| {
            let message = format!("has {lines} lines; consider splitting the file if it holds two ideas");
            Finding::new(&file.path, message)
        })
        .collect()
}

/// Whether the code contains the keyword `unsafe`.
fn contains_unsafe(code: TokenStream) -> bool {
    code.into_iter().any(|token| match token {
        TokenTree::Group(group) => contains_unsafe(group.stream()),
        TokenTree::Ident(name) => name == "unsafe",
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{File, Tree};
    use super::{long_files, sources};

    fn check(path: &str, text: &str) -> Vec<String> {
        let tree = Tree { files: vec![File::new(path, text)] };
        sources(&tree).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn finds_long_main_files_and_lists_other_long_ones() {
        assert_eq!(check("a/src/lib.rs", &"//!\n".repeat(701)), [""; 0]);
        assert_eq!(check("a/src/main.rs", &"//!\n".repeat(41)).len(), 1);
        let tree = |lines| Tree { files: vec![File::new("a/src/lib.rs", &"//!\n".repeat(lines))] };
        assert_eq!(long_files(&tree(700)), []);
        assert_eq!(long_files(&tree(701)).len(), 1);
    }

    #[test]
    fn finds_mod_files_and_modules_without_a_description() {
        assert_eq!(check("a/src/b/mod.rs", "//! b\n").len(), 1);
        assert_eq!(check("a/src/b.rs", "fn b() {}\n").len(), 1);
    }

    #[test]
    fn finds_unsafe_outside_its_crate_only() {
        let text = "//! a\nfn a() { unsafe { b() } }\n";
        assert_eq!(check("server/engine/src/a.rs", text).len(), 1);
        assert_eq!(check("server/openvino/src/a.rs", text), [""; 0]);
    }

    #[test]
    fn ignores_unsafe_in_comments_and_literals() {
        for innocent in [
            "// unsafe",
            "/* /* unsafe */ unsafe */",
            r#"let a = "\" unsafe";"#,
            "let a = r#\"\" unsafe\"#;",
            "let a = br\"unsafe\";",
            "#![deny(unsafe_code)]",
            "let a = ('\"', \"unsafe\", '\\'');",
        ] {
            assert_eq!(check("a/src/b.rs", &format!("//! b\n{innocent}\n")), [""; 0], "{innocent}");
        }
        for guilty in [
            "fn a<'a>(b: &'a str) { unsafe {} }",
            "let a = \"//\"; unsafe {}",
            "let a = '\"'; unsafe {} let b = '\"';",
            "/* a */ unsafe {}",
        ] {
            assert_eq!(check("a/src/b.rs", &format!("//! b\n{guilty}\n")).len(), 1, "{guilty}");
        }
    }
}
