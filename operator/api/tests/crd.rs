//! What is in `crds/` is what the types say: `UPDATE_EXPECT=1 cargo test -p operator-api`.

use expect_test::expect_file;

#[test]
fn the_definition_in_crds_is_the_one_of_the_types() {
    let yaml = serde_yaml::to_string(&operator_api::crd()).expect("a definition is YAML");
    let text =
        format!("# Generated from operator/api by `UPDATE_EXPECT=1 cargo test -p operator-api`.\n{yaml}");
    expect_file!["../../../crds/llmdeployments.yaml"].assert_eq(&text);
}
