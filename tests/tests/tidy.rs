//! Checks the repository against the rules in `tests/src/tidy.rs`.

use tests::tidy::{
    Finding, RustFile, Tree, base_images, colliding_aliases, contents, decisions, doc_comments,
    linked_functions, links, long_files, manifests, marked_blocks, members, mentioned_flags, module_cycles,
    packed_parameters, pages, rust_files, sources, supersessions, type_names,
};

fn tree() -> Tree {
    let tree = Tree::read(&tests::root()).expect("the repository can be read");
    assert!(
        tree.file("Cargo.lock").is_some() && tree.files.len() > 50,
        "the root of the repository was not found"
    );
    tree
}

fn assert_none(findings: &[Finding]) {
    let lines: Vec<String> =
        findings.iter().map(|finding| format!("{}: {}", finding.path, finding.message)).collect();
    assert!(lines.is_empty(), "\n{}", lines.join("\n"));
}

#[test]
fn crates_are_named_by_their_path_and_depend_as_allowed() {
    assert_none(&manifests(&tree()));
}

#[test]
fn rust_files_are_documented_and_safe() {
    assert_none(&sources(&tree()));
    for long in long_files(&tree()) {
        eprintln!("{}: {}", long.path, long.message);
    }
}

#[test]
fn no_file_is_large_or_names_a_machine_or_a_registry() {
    assert_none(&contents(&tree()));
}

#[test]
fn base_images_are_pinned_by_digest() {
    let tree = tree();
    assert!(tree.file("deploy/server.Dockerfile").is_some());
    assert_none(&base_images(&tree));
}

#[test]
fn links_in_documents_exist() {
    assert_none(&links(&tree()));
}

#[test]
fn pages_are_in_the_table_of_contents_and_name_their_readers() {
    assert_none(&pages(&tree()));
}

#[test]
fn decisions_have_unique_numbers_and_all_parts() {
    assert_none(&decisions(&tree()));
}

#[test]
fn linked_functions_exist() {
    assert_none(&linked_functions(&tree()));
}

#[test]
fn superseded_decisions_link_to_their_successors() {
    assert_none(&supersessions(&tree()));
}

#[test]
fn code_blocks_in_pages_are_tested_or_say_why_not() {
    assert_none(&marked_blocks(&tree()));
}

#[test]
fn flags_in_documents_exist() {
    let tree = tree();
    let generated = tree.files.iter().filter(|file| file.path.starts_with("docs/reference/flags-"));
    let reference: String = generated.map(|file| file.text.as_str()).collect();
    assert!(reference.contains("--port"), "the tests of the products generate docs/reference/flags-*.md");
    assert_none(&mentioned_flags(&tree, &reference));
}

/// Applies a rule to the files of every crate.
fn findings_in_crates(rule: impl Fn(&[RustFile]) -> Vec<Finding>) -> Vec<Finding> {
    let tree = tree();
    let members = members(&tree);
    assert!(members.iter().any(|member| member == "tests"), "the workspace has this crate: {members:?}");
    let files = |path: &String| rust_files(&tree, path).expect("the crate has valid Rust files");
    members.iter().flat_map(|path| rule(&files(path))).collect()
}

#[test]
fn type_names_are_nouns_with_content() {
    assert_none(&findings_in_crates(|files| files.iter().flat_map(type_names).collect()));
}

#[test]
fn no_alias_separates_two_of_our_own_names() {
    assert_none(&findings_in_crates(|files| files.iter().flat_map(colliding_aliases).collect()));
}

#[test]
fn no_parameter_packs_several_arguments() {
    assert_none(&findings_in_crates(|files| files.iter().flat_map(packed_parameters).collect()));
}

#[test]
fn doc_comments_are_at_least_a_clause() {
    assert_none(&findings_in_crates(|files| files.iter().flat_map(doc_comments).collect()));
}

#[test]
fn modules_form_no_cycles() {
    assert_none(&findings_in_crates(module_cycles));
}
