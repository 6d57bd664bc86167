//! The flags of the server and the router of this version, and the rules for `extraArgs`. The lists of flags are
//! generated from the reference in `docs/` by `UPDATE_EXPECT=1 cargo test -p operator-api`.

use serde_json::{Value, json};

/// The flags of the server, one per line.
pub const SERVER_FLAGS: &str = include_str!("server-flags.txt");
/// The flags of the router, one per line.
pub const ROUTER_FLAGS: &str = include_str!("router-flags.txt");

/// The flags that a list of `extraArgs` may contain.
pub(crate) struct ExtraArgs<'a> {
    /// The field that contains the list, such as `engine`.
    pub(crate) field: &'a str,
    /// The name of the program, for messages.
    pub(crate) program: &'a str,
    /// All flags of the program, one per line.
    pub(crate) known: &'a str,
    /// The flags that `extraArgs` must not contain, each with what to use instead, or with the reason.
    pub(crate) reserved: &'a [(&'a str, &'a str)],
}

impl ExtraArgs<'_> {
    /// Returns the rules for the object that contains the list and the image of the program. If the resource sets the
    /// image, unknown flags are allowed, because the image may contain another version of the program.
    pub(crate) fn rules(&self) -> Value {
        let Self { field, program, known, reserved } = self;
        let flag = "argument.split('=')[0]";
        let quoted =
            |flags: Vec<&str>| flags.iter().map(|flag| format!("'{flag}'")).collect::<Vec<_>>().join(", ");
        let is_reserved = format!("{flag} in [{}]", quoted(reserved.iter().map(|(flag, _)| *flag).collect()));
        let is_known = format!("{flag} in [{}]", quoted(known.lines().collect()));
        // Another rule rejects arguments that are not flags.
        let is_unknown = format!("argument.startsWith('--') && !({is_reserved}) && !({is_known})");
        let first_reserved = format!("self.extraArgs.filter(argument, {is_reserved})[0].split('=')[0]");
        let first_unknown = format!("self.extraArgs.filter(argument, {is_unknown})[0].split('=')[0]");
        let instead: Vec<String> =
            reserved.iter().map(|(flag, instead)| format!("'{flag}': '{instead}'")).collect();
        json!([
            {
                "rule": "self.extraArgs.all(argument, argument.startsWith('--'))",
                "message": format!("each item of {field}.extraArgs must be one flag, with its value after =, such as --max-body-bytes=8MiB"),
            },
            {
                "rule": format!("!self.extraArgs.exists(argument, {is_reserved})"),
                "message": format!("{field}.extraArgs must not contain a flag that the operator sets"),
                "messageExpression": format!(
                    "'{field}.extraArgs must not contain ' + {first_reserved} + ': ' + {{{}}}[{first_reserved}]",
                    instead.join(", ")
                ),
            },
            {
                "rule": format!("has(self.image) || !self.extraArgs.exists(argument, {is_unknown})"),
                "message": format!("{field}.extraArgs contains a flag that the {program} does not support"),
                "messageExpression": format!(
                    "'{field}.extraArgs: the {program} of the installed ovfleet release has no flag ' + {first_unknown}"
                ),
            },
        ])
    }
}
