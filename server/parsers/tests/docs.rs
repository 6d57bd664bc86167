//! Checks that the reference in `docs/` lists every format by its name.

use server_parsers::{ReasoningFormat, ToolFormat};

#[test]
fn every_format_is_in_the_reference() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/parsers.md");
    let text = std::fs::read_to_string(path).expect("the reference is in the tree");
    let (tools, rest) = text.split_once("## Formats of reasoning").expect("the reference has two tables");
    let (reasoning, rest) = rest.split_once("## What the parsers return").expect("a part follows the tables");
    let (_, detection) =
        rest.split_once("## How formats are detected").expect("the reference has a detection table");
    let columns = detection.lines().filter(|line| line.starts_with("| "));
    let detected: Vec<&str> =
        columns.flat_map(|line| line.split('|').rev().skip(1).take(2)).map(str::trim).collect();
    for format in ToolFormat::ALL {
        let name = format!("`{}`", format.name());
        assert!(tools.contains(&format!("\n| {name} |")), "{name} is missing from the table of tool formats");
        assert!(detected.contains(&name.as_str()), "{name} is missing from the detection table");
    }
    for format in ReasoningFormat::ALL {
        let name = format!("`{}`", format.name());
        assert!(reasoning.contains(&name), "{name} is missing from the table of reasoning formats");
    }
}
