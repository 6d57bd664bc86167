//! Rules for Markdown: the targets of links and the mentioned flags must exist, decisions must have all required
//! sections, and pages must be in the table of contents and name their readers.

use std::collections::BTreeSet;

use super::{File, Finding, Tree};

/// The maximum length of `ARCHITECTURE.md` in lines.
const ARCHITECTURE_LINES_MAX: usize = 350;
/// The required headings of a decision.
const DECISION_PARTS: [&str; 3] = ["\n## Context\n", "\n## Decision\n", "\n## Consequences\n"];

/// Checks that relative links lead to an existing file or directory and, if they name a heading, to an existing
/// heading.
#[must_use]
pub fn links(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in markdown(tree) {
        for target in targets(&file.text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { file.path.clone() } else { resolve(&file.path, path) };
            let directory = format!("{path}/");
            let found = tree.file(&path);
            if found.is_none() && !tree.files.iter().any(|other| other.path.starts_with(&directory)) {
                findings.push(Finding::new(&file.path, format!("links to {target}, which does not exist")));
            } else if !heading.is_empty() && !found.is_some_and(|found| has_heading(&found.text, heading)) {
                let message = format!("links to {target}, but this heading does not exist");
                findings.push(Finding::new(&file.path, message));
            }
        }
    }
    findings
}

/// Checks that each `--flag` in the documents for users is in `reference`, the generated lists of flags. Commands of
/// other programs are skipped, including their continuation lines.
#[must_use]
pub fn mentioned_flags(tree: &Tree, reference: &str) -> Vec<Finding> {
    const OTHERS: [&str; 12] = [
        "cargo ",
        "curl ",
        "docker ",
        "git ",
        "helm ",
        "kind ",
        "kubectl ",
        "llama-gguf-split ",
        "npm ",
        "optimum-cli ",
        "pip ",
        "python3 ",
    ];
    let known: BTreeSet<&str> = flags(reference).collect();
    let mut findings = Vec::new();
    // Other directories are excluded: the reference is generated, and decisions and results also name flags of earlier
    // versions and of other programs.
    const DIRECTORIES: [&str; 3] = ["docs/tutorials/", "docs/how-to/", "docs/explanation/"];
    let users = |file: &&File| {
        file.path == "README.md" || DIRECTORIES.iter().any(|directory| file.path.starts_with(directory))
    };
    for file in markdown(tree).filter(users) {
        let text = file.text.replace("\\\n", " ");
        for line in text.lines().filter(|line| !OTHERS.iter().any(|other| line.contains(other))) {
            for flag in flags(line).filter(|flag| !known.contains(flag)) {
                findings.push(Finding::new(
                    &file.path,
                    format!("mentions {flag}, which is not a flag of ovfleet"),
                ));
            }
        }
    }
    findings
}

/// The table of contents of the documentation site.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Checks that each page of the documentation is listed once in `docs/SUMMARY.md`, and opens with a title and a
/// sentence that names its readers. Decisions have a different format.
#[must_use]
pub fn pages(tree: &Tree) -> Vec<Finding> {
    let summary = tree.file(SUMMARY).map_or("", |file| &file.text);
    let listed: Vec<String> = summary
        .lines()
        .flat_map(|line| line.split("](").skip(1).filter_map(|link| link.split(')').next()))
        .map(|link| resolve(SUMMARY, link))
        .collect();
    let mut findings = Vec::new();
    let is_page = |file: &&File| file.path.starts_with("docs/") && file.path != SUMMARY;
    for file in markdown(tree).filter(is_page) {
        match listed.iter().filter(|path| **path == file.path).count() {
            0 => findings.push(Finding::new(&file.path, format!("is not listed in {SUMMARY}"))),
            1 => {}
            count => {
                findings.push(Finding::new(
                    &file.path,
                    format!("is listed {count} times in {SUMMARY}, not once"),
                ));
            }
        }
        let is_decision = file.path.starts_with("docs/decisions/") && !file.path.ends_with("/README.md");
        let mut lines = file.text.lines().filter(|line| !line.trim().is_empty());
        if !is_decision && !lines.next().is_some_and(|line| line.starts_with("# ")) {
            findings.push(Finding::new(&file.path, "does not begin with a title"));
        } else if !is_decision && !lines.next().is_some_and(|line| line.starts_with("For ")) {
            findings.push(Finding::new(
                &file.path,
                "does not open with a sentence `For …` that names its readers",
            ));
        }
    }
    findings
}

/// Checks the numbers and the sections of decisions, and the length of `ARCHITECTURE.md`.
#[must_use]
pub fn decisions(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut numbers = BTreeSet::new();
    for file in &tree.files {
        if file.path == "ARCHITECTURE.md" && file.text.lines().count() > ARCHITECTURE_LINES_MAX {
            findings.push(Finding::new(&file.path, format!("has more than {ARCHITECTURE_LINES_MAX} lines")));
        }
        let Some(name) = file.path.strip_prefix("docs/decisions/") else { continue };
        if name == "README.md" {
            continue;
        }
        let number = name.split('-').next().unwrap_or_default();
        if number.len() != 4 || number.parse::<u16>().is_err() || !numbers.insert(number) {
            findings.push(Finding::new(&file.path, "not named NNNN-title.md with a unique number"));
        }
        for part in DECISION_PARTS.iter().filter(|part| !file.text.contains(**part)) {
            findings.push(Finding::new(&file.path, format!("the section {:?} is missing", part.trim())));
        }
    }
    findings
}

/// Checks that a decision and each decision that it supersedes, wholly or in part, link to each other: the part before
/// `## Context` of the new decision contains `Supersedes`, and that of the old decision contains `Superseded by` or
/// `Superseded in part by`.
#[must_use]
pub fn supersessions(tree: &Tree) -> Vec<Finding> {
    const DIRECTORY: &str = "docs/decisions/";
    // Each element is a pair: the new decision and the old one.
    let mut supersedes = BTreeSet::new();
    let mut superseded = BTreeSet::new();
    for file in tree.files.iter().filter(|file| file.path.starts_with(DIRECTORY)) {
        let head = file.text.split("\n## Context\n").next().unwrap_or_default();
        for statement in head.split("Supersede").skip(1) {
            let paragraph = statement.split("\n\n").next().unwrap_or_default();
            for other in targets(paragraph).into_iter().map(|target| resolve(&file.path, target)) {
                if statement.starts_with('d') {
                    superseded.insert((other, file.path.clone()));
                } else {
                    supersedes.insert((file.path.clone(), other));
                }
            }
        }
    }
    let unlinked = |(new, old): &(String, String)| {
        let message = format!(
            "{new} supersedes this decision; add `Superseded by` or `Superseded in part by` with a link to {new}"
        );
        Finding::new(old, message)
    };
    let unstated = |(new, old): &(String, String)| {
        let message = format!(
            "according to {old}, this decision supersedes {old}; add `Supersedes` with a link to {old}"
        );
        Finding::new(new, message)
    };
    let findings = supersedes.difference(&superseded).map(unlinked);
    findings.chain(superseded.difference(&supersedes).map(unstated)).collect()
}

/// Checks that a file that is linked as [`name`](file.rs) defines a function with this name.
#[must_use]
pub fn linked_functions(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in markdown(tree) {
        for link in file.text.split("[`").skip(1) {
            let Some((name, rest)) = link.split_once("`](") else { continue };
            let Some((target, _)) = rest.split_once(')') else { continue };
            let is_name = name.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_');
            if !is_name || !target.ends_with(".rs") {
                continue;
            }
            let defines = |source: &&File| {
                [format!("fn {name}("), format!("fn {name}<")]
                    .iter()
                    .any(|definition| source.text.contains(definition))
            };
            if tree.file(&resolve(&file.path, target)).filter(defines).is_none() {
                findings.push(Finding::new(&file.path, format!("{target} has no function {name}")));
            }
        }
    }
    findings
}

fn markdown(tree: &Tree) -> impl Iterator<Item = &File> {
    tree.files.iter().filter(|file| file.path.ends_with(".md"))
}

/// The targets of the inline links of a document, without those in code.
fn targets(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if fenced {
            continue;
        }
        // The pieces with odd indices are code, between backticks.
        for prose in line.split('`').step_by(2) {
            found.extend(prose.split("](").skip(1).filter_map(|link| link.split(')').next()));
        }
        // A link whose text is code: [`a`](b).
        found.extend(line.split("`](").skip(1).filter_map(|link| link.split(')').next()));
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Resolves `link`, which is relative to the file `from`, to a path from the root of the repository.
fn resolve(from: &str, link: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn has_heading(text: &str, wanted: &str) -> bool {
    text.lines().filter(|line| line.starts_with('#')).any(|line| {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let slug: String = heading
            .chars()
            .filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'))
            .map(|letter| if letter == ' ' { '-' } else { letter })
            .collect();
        slug == wanted
    })
}

fn flags(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-').filter(|word| {
        word.strip_prefix("--").is_some_and(|name| name.starts_with(|first: char| first.is_ascii_lowercase()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Tree {
        Tree { files: files.iter().map(|(path, text)| File::new(path, text)).collect() }
    }

    #[test]
    fn finds_broken_links() {
        let found = links(&tree(&[
            (
                "README.md",
                "[a](docs/a.md) [b](docs) [`c`](gone.md) [d](docs/a.md#one-two) [e](docs/a.md#three)",
            ),
            ("docs/a.md", "# One two\n[up](../README.md) [away](../../x.md) [web](https://host/a)\n"),
        ]));
        let found: Vec<&str> = found.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(
            found,
            [
                "links to docs/a.md#three, but this heading does not exist",
                "links to gone.md, which does not exist",
                "links to ../../x.md, which does not exist",
            ]
        );
    }

    #[test]
    fn ignores_links_in_code() {
        assert_eq!(links(&tree(&[("a.md", "`[a](b)`\n```\n[a](b)\n```\n")])), []);
    }

    #[test]
    fn finds_flags_that_do_not_exist() {
        let documents =
            tree(&[("README.md", "`--port` and --prot\n| --- | a--b |\ncurl --silent \\\n  --fail\n")]);
        let found = mentioned_flags(&documents, "| `--port` | the port |");
        assert_eq!(found, [Finding::new("README.md", "mentions --prot, which is not a flag of ovfleet")]);
    }

    #[test]
    fn finds_decisions_without_number_or_parts() {
        let whole = "# A\n\n## Context\n\n## Decision\n\n## Consequences\n";
        assert_eq!(decisions(&tree(&[("docs/decisions/0001-a.md", whole)])), []);
        assert_eq!(decisions(&tree(&[("docs/decisions/layout.md", whole)])).len(), 1);
        let twice = [("docs/decisions/0001-a.md", whole), ("docs/decisions/0001-b.md", whole)];
        assert_eq!(decisions(&tree(&twice)).len(), 1);
        assert_eq!(decisions(&tree(&[("docs/decisions/0001-a.md", "# A\n")])).len(), 3);
    }

    #[test]
    fn finds_links_to_functions_that_do_not_exist() {
        let page = "[`run`](a.rs) [`stop`](a.rs) [`other.rs`](a.rs) [`pick`](b.rs) `x` [text](c.md)";
        let found =
            linked_functions(&tree(&[("p.md", page), ("a.rs", "fn run() {}"), ("b.rs", "fn pick<T>() {}")]));
        assert_eq!(found, [Finding::new("p.md", "a.rs has no function stop")]);
    }

    #[test]
    fn finds_superseded_decisions_without_a_link() {
        let new = "# 2\n\nDate: today. Supersedes in part\n[1](0001-a.md).\n\n## Context\n";
        let old = "# 1\n\nSuperseded in part by [2](0002-b.md), and by [3](0003-c.md).\n\n## Context\n";
        let three = "# 3\n\nSupersedes [1](0001-a.md).\n\n## Context\n[2](0002-b.md)\n";
        let found = |old, three| {
            let files = [("0001-a.md", old), ("0002-b.md", new), ("0003-c.md", three)];
            let files = files.map(|(name, text)| File::new(&format!("docs/decisions/{name}"), text));
            supersessions(&Tree { files: files.into() }).len()
        };
        assert_eq!(found(old, three), 0);
        assert_eq!(found("# 1\n\n## Context\n", three), 2);
        assert_eq!(found(old, "# 3\n\n## Context\n"), 1);
    }

    #[test]
    fn finds_pages_that_are_not_listed_or_do_not_name_their_readers() {
        let good = "# A\n\nFor readers: what they get.\n";
        let found = pages(&tree(&[
            (
                "docs/SUMMARY.md",
                "- [A](a.md)\n- [B](b.md) [B](b.md)\n- [Log](../CHANGELOG.md)\n- [D](decisions/0001-d.md)\n",
            ),
            ("docs/a.md", good),
            ("docs/b.md", good),
            ("docs/c.md", "# C\n\nWhat it is.\n"),
            ("docs/d/e.md", "For readers: no title.\n"),
            ("docs/decisions/0001-d.md", "# 0001: D\n\n## Context\n"),
            ("server/README.md", "anything\n"),
        ]));
        let found: Vec<(&str, &str)> =
            found.iter().map(|finding| (finding.path.as_str(), finding.message.as_str())).collect();
        assert_eq!(
            found,
            [
                ("docs/b.md", "is listed 2 times in docs/SUMMARY.md, not once"),
                ("docs/c.md", "is not listed in docs/SUMMARY.md"),
                ("docs/c.md", "does not open with a sentence `For …` that names its readers"),
                ("docs/d/e.md", "is not listed in docs/SUMMARY.md"),
                ("docs/d/e.md", "does not begin with a title"),
            ]
        );
    }

    #[test]
    fn finds_an_architecture_that_is_too_long() {
        assert_eq!(
            decisions(&tree(&[("ARCHITECTURE.md", &"line\n".repeat(ARCHITECTURE_LINES_MAX + 1))])).len(),
            1
        );
    }
}
