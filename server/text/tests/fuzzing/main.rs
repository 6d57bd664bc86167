//! Fuzzes templates and tokenizers with random mutations. These runs have fixed seeds and take seconds; `make fuzz`
//! runs for a configurable time.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../fuzz/mutations.rs"]
mod mutations;
mod template;
mod tokenizer;

use mutations::{check_mutations, seeds};

const CASES: u64 = 20_000;

/// The templates of model families, and small templates with and without the other parts of an input.
fn template_seeds() -> Vec<Vec<u8>> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/templates");
    let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|path| path.extension().is_some_and(|end| end == "jinja")).collect();
    paths.sort();
    let mut seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let small = [
        "{% for m in messages %}{{ m.role ~ ': ' ~ m['content'] | trim }}{% endfor %}",
        "{% set ns = namespace(a='', n=0) %}{% for m in messages[1:] if m.content is string %}{% set ns.a = ns.a + m.content.split('</think>')[-1] %}{% endfor %}{{ ns.a | tojson(indent=2) }}",
        "{%- macro f(x, y=1) %}{% if x is mapping %}{% for k, v in x | dictsort %}{{ k }}={{ f(v) }}{% endfor %}{% elif x is iterable %}{{ x | join(', ') }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f(tools) }}",
        "{{ strftime_now('%d %b %Y') }}{% if not tools %}{{ raise_exception('none') }}{% endif %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{% for a in range(messages | length) %}{{ loop.index0 % 2 == 0 }}{{ messages[a].content[:3] }}{{ '%s' | format(a) }}{% endfor %}",
    ];
    let parts = [
        "[{\"role\": \"user\", \"content\": \"x\"}]\u{1e}[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\"}}}}}]\u{1e}{\"enable_thinking\": false}",
        "[{\"role\": \"user\", \"content\": [{\"type\": \"text\"}]}, {\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": \"{}\"}}]}]",
    ];
    for small in small {
        seeds.push(small.into());
        seeds.extend(parts.iter().map(|part| format!("{small}{}{part}", template::SEPARATOR).into_bytes()));
    }
    seeds
}

#[test]
fn a_template_renders_or_is_rejected() {
    let dictionary = include_str!("../../../fuzz/dictionaries/template.dict");
    check_mutations(CASES, &template_seeds(), dictionary, template::check);
}

/// The number of tokenizers to check, which is lower than `CASES`, because building one takes milliseconds.
const TOKENIZER_CASES: u64 = 3_000;

#[test]
fn a_tokenizer_loads_or_is_refused_with_a_reason() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/tokenizer");
    check_mutations(
        TOKENIZER_CASES,
        &seeds(directory),
        include_str!("../../../fuzz/dictionaries/tokenizer.dict"),
        tokenizer::check,
    );
}
