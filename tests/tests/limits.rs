//! Checks that the reference of limits is up to date.
//! `UPDATE_EXPECT=1 cargo test -p tests --test limits` generates it.

use expect_test::expect_file;
use tests::limits::{limits, reference};
use tests::tidy::Tree;

#[test]
fn the_reference_of_limits_is_up_to_date() {
    let tree = Tree::read(&tests::root()).expect("the tree is readable");
    expect_file!["../../docs/reference/limits.md"].assert_eq(&reference(&limits(&tree)));
}
