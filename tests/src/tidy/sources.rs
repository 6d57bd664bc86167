//! Rules about Rust files: module documentation, the use of `unsafe`, and the length of files.

use super::{Finding, Tree};

/// Rust files with more lines than this are listed, because they may contain two ideas.
const LONG_FILE_LINES: usize = 700;
/// The maximum length of `main.rs` in lines. It only parses arguments, sets up the process and calls the library.
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
        if !file.path.starts_with(UNSAFE_IN) && words(&file.text).any(|word| word == "unsafe") {
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
            Finding::new(&file.path, format!("{lines} lines; consider splitting it if it holds two ideas"))
        })
        .collect()
}

/// Returns the words of Rust code, without comments and literals.
fn words(text: &str) -> impl Iterator<Item = String> {
    code(text)
        .split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect::<Vec<_>>()
        .into_iter()
}

/// Replaces the comments, strings and characters in `text` by spaces.
fn code(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let skipped = comment(rest).or_else(|| literal(rest, &out)).unwrap_or(0);
        if skipped > 0 {
            out.push(' ');
            rest = &rest[skipped..];
        } else {
            out.push(letter);
            rest = &rest[letter.len_utf8()..];
        }
    }
    out
}

/// The length in bytes of a comment at the start of `rest`. Block comments nest.
fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if !rest.starts_with("/*") {
        return None;
    }
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return Some(at);
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    Some(rest.len())
}

/// The length in bytes of a string or character literal at the start of `rest`, which follows the code in `before`.
fn literal(rest: &str, before: &str) -> Option<usize> {
    let inside_word = before.chars().next_back().is_some_and(|last| last.is_alphanumeric() || last == '_');
    if rest.starts_with('r') && (!inside_word || before.ends_with('b') || before.ends_with('c')) {
        let hashes = rest[1..].chars().take_while(|letter| *letter == '#').count();
        if rest[1 + hashes..].starts_with('"') {
            let end = format!("\"{}", "#".repeat(hashes));
            let body = 2 + hashes;
            return Some(rest[body..].find(&end).map_or(rest.len(), |at| body + at + end.len()));
        }
    }
    if rest.starts_with('"') {
        return Some(quoted(rest, '"'));
    }
    // 'a' and '\n' are characters, but 'a is a lifetime.
    let mut letters = rest.strip_prefix('\'')?.chars();
    let first = letters.next()?;
    (first == '\\' || letters.next() == Some('\'')).then(|| quoted(rest, '\''))
}

/// The length in bytes of a quoted literal, which may contain escapes.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, letter) in rest.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if letter == quote => return at + letter.len_utf8(),
            _ => {}
        }
    }
    rest.len()
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
