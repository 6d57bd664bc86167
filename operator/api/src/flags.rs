//! The flags that servers and routers of this version have, and which of them `extraArgs` may hold. The lists of flags are
//! generated from the reference in `docs/`: `UPDATE_EXPECT=1 cargo test -p operator-api` writes them.

use serde_json::{Value, json};

/// The flags of the server, one a line.
pub const SERVER_FLAGS: &str = include_str!("server-flags.txt");
/// The flags of the router, one a line.
pub const ROUTER_FLAGS: &str = include_str!("router-flags.txt");

/// Which flags a list of `extraArgs` may hold.
pub(crate) struct ExtraArgs<'a> {
    /// The field that the list is in, as in `engine`.
    pub(crate) field: &'a str,
    /// The program, for messages.
    pub(crate) program: &'a str,
    /// All flags of the program, one a line.
    pub(crate) known: &'a str,
    /// The flags that the operator sets, and what to use instead.
    pub(crate) taken: &'a [(&'a str, &'a str)],
}

impl ExtraArgs<'_> {
    /// The rules for the object that has the list, and the program's image beside it. Another image may be of another
    /// version, with flags that are not known here.
    pub(crate) fn rules(&self) -> Value {
        let Self { field, program, known, taken } = self;
        let flag = "argument.split('=')[0]";
        let quoted =
            |flags: Vec<&str>| flags.iter().map(|flag| format!("'{flag}'")).collect::<Vec<_>>().join(", ");
        let is_taken = format!("{flag} in [{}]", quoted(taken.iter().map(|(flag, _)| *flag).collect()));
        let is_known = format!("{flag} in [{}]", quoted(known.lines().collect()));
        let first_taken = format!("self.extraArgs.filter(argument, {is_taken})[0].split('=')[0]");
        let first_unknown =
            format!("self.extraArgs.filter(argument, !({is_taken}) && !({is_known}))[0].split('=')[0]");
        let instead: Vec<String> =
            taken.iter().map(|(flag, instead)| format!("'{flag}': '{instead}'")).collect();
        json!([
            {
                "rule": "self.extraArgs.all(argument, argument.startsWith('--'))",
                "message": format!("each of {field}.extraArgs begins with -- and has its value behind =, as in --log=debug"),
            },
            {
                "rule": format!("!self.extraArgs.exists(argument, {is_taken})"),
                "message": format!("{field}.extraArgs may not repeat a flag that has a field of its own, nor one that the operator sets"),
                "messageExpression": format!(
                    "'{field}.extraArgs may not have ' + {first_taken} + ': ' + {{{}}}[{first_taken}]",
                    instead.join(", ")
                ),
            },
            {
                "rule": format!(
                    "has(self.image) || self.extraArgs.all(argument, !argument.startsWith('--') || {is_taken} || {is_known})"
                ),
                "message": format!("{field}.extraArgs has a flag that the {program} does not know"),
                "messageExpression": format!(
                    "'{field}.extraArgs: the {program} of this version has no flag ' + {first_unknown}"
                ),
            },
        ])
    }
}
