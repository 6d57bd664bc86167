//! The code blocks that the reader of a page runs. Each has a mark that states how it is tested, or why it is not
//! tested.

use super::{File, Finding, Tree};

/// The languages of the blocks that a reader runs.
const LANGUAGES: [&str; 5] = ["sh", "bash", "console", "python", "js"];
/// The minimum number of words of the reason why a block is not tested.
const REASON_WORDS_MIN: usize = 3;

/// The environment that a tested block needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scene {
    /// A server with the sample model, named `smollm2`, at the address in the block.
    Server,
    /// The server that an earlier block of the page starts, at the address in the block.
    ServerOfPage,
    /// The programs of ovfleet, which the block starts. Each runs until it prints the expected text.
    Programs,
    /// A Kubernetes API server, without a node.
    ApiServer,
}

/// The comment in front of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A test runs the block in `scene`, and the output contains `expected`.
    Tested {
        /// The environment that the block needs.
        scene: Scene,
        /// The text that the output must contain.
        expected: String,
    },
    /// No test runs the block, for the given reason.
    NotTested(String),
}

/// A code block that a reader runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeBlock {
    /// The number of the line that opens the block, from 1.
    pub line: usize,
    /// The language of the code.
    pub language: String,
    /// The code, without the indentation of the block.
    pub code: String,
    /// The comment in front of the block; `None` if it is missing or invalid.
    pub mark: Option<Mark>,
}

/// Whether `path` is a page whose blocks are tested.
#[must_use]
pub fn has_tested_blocks(path: &str) -> bool {
    path == "README.md" || (path.starts_with("docs/") && path.ends_with(".md"))
}

/// Returns the code blocks that the reader of a page runs.
#[must_use]
pub fn code_blocks(text: &str) -> Vec<CodeBlock> {
    let lines: Vec<&str> = text.lines().collect();
    let mut blocks = Vec::new();
    let mut index = 0;
    while index < lines.len() {
        let Some(language) = lines[index].trim_start().strip_prefix("```") else {
            index += 1;
            continue;
        };
        let opening = index;
        let indent = lines[index].len() - lines[index].trim_start().len();
        let length = lines[index + 1..].iter().take_while(|line| line.trim() != "```").count();
        index += length + 2;
        if LANGUAGES.contains(&language.trim()) {
            let code = &lines[opening + 1..opening + 1 + length];
            let code: Vec<&str> = code.iter().map(|line| line.get(indent..).unwrap_or_default()).collect();
            blocks.push(CodeBlock {
                line: opening + 1,
                language: language.trim().to_owned(),
                code: code.join("\n"),
                mark: opening.checked_sub(1).and_then(|before| mark(lines[before].trim())),
            });
        }
    }
    blocks
}

fn mark(line: &str) -> Option<Mark> {
    let (kind, text) = line.strip_prefix("<!-- ")?.strip_suffix(" -->")?.split_once(": ")?;
    let scene = match kind {
        "tested" => Scene::Server,
        "tested with the server above" => Scene::ServerOfPage,
        "tested with the programs" => Scene::Programs,
        "tested with an API server" => Scene::ApiServer,
        "not tested" => {
            let is_reason = text.split_whitespace().count() >= REASON_WORDS_MIN;
            return is_reason.then(|| Mark::NotTested(text.to_owned()));
        }
        _ => return None,
    };
    Some(Mark::Tested { scene, expected: text.to_owned() })
}

/// Checks that each block that a reader runs is marked. `tests/tests/pages.rs` runs those that are marked as tested.
#[must_use]
pub fn marked_blocks(tree: &Tree) -> Vec<Finding> {
    let pages = tree.files.iter().filter(|file| has_tested_blocks(&file.path));
    let unmarked = |file: &File| -> Vec<Finding> {
        let blocks = code_blocks(&file.text).into_iter().filter(|block| block.mark.is_none());
        let message = |block: CodeBlock| {
            format!(
                "line {}: the {} block needs a mark on the line before it, such as `<!-- tested: TEXT -->` or \
                 `<!-- not tested: REASON -->` with a reason of at least {REASON_WORDS_MIN} words",
                block.line, block.language
            )
        };
        blocks.map(|block| Finding::new(&file.path, message(block))).collect()
    };
    pages.flat_map(unmarked).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_blocks_and_their_marks() {
        let page = "<!-- tested: Paris -->\n```sh\ncurl a\n```\n1. Item\n\n   <!-- tested with an API server: made -->\n   \
                    ```sh\n   kubectl a \\\n     --b\n   ```\n\n```yaml\na: b\n```\n<!-- not tested: needs a GPU -->\n\
                    ```python\nprint()\n```\n";
        let blocks = code_blocks(page);
        let tested = |scene, expected: &str| Some(Mark::Tested { scene, expected: expected.to_owned() });
        assert_eq!(blocks.len(), 3);
        assert_eq!((blocks[0].line, blocks[0].code.as_str()), (2, "curl a"));
        assert_eq!(blocks[0].mark, tested(Scene::Server, "Paris"));
        assert_eq!(blocks[1].code, "kubectl a \\\n  --b");
        assert_eq!(blocks[1].mark, tested(Scene::ApiServer, "made"));
        assert_eq!(blocks[2].mark, Some(Mark::NotTested("needs a GPU".to_owned())));
    }

    #[test]
    fn finds_blocks_without_a_valid_mark() {
        let unmarked = |text: &str| {
            marked_blocks(&Tree {
                files: vec![File::new("README.md", text), File::new("a/b.md", "```sh\n```\n")],
            })
            .len()
        };
        assert_eq!(unmarked("```sh\nmake\n```\n"), 1);
        assert_eq!(unmarked("<!-- not tested: slow -->\n```sh\nmake\n```\n"), 1);
        assert_eq!(unmarked("<!-- tested elsewhere: yes -->\n```js\n```\n"), 1);
        assert_eq!(unmarked("<!-- tested: Paris -->\n\n```js\n```\n"), 1);
        assert_eq!(unmarked("<!-- tested: Paris -->\n```js\n```\n```yaml\na: b\n```\n"), 0);
    }
}
