//! The environment variables that set flags.

use clap::Arg;

/// Returns a function for `Command::mut_args` that lets each flag of a command be set by its own environment variable.
/// The name of the variable consists of `prefix` and the name of the flag in upper case, with underscores: with the
/// prefix `OVFLEET_`, `OVFLEET_MAX_QUEUE` sets `--max-queue`.
pub fn env_with_prefix(prefix: &str) -> impl FnMut(Arg) -> Arg {
    move |argument| match argument.get_long() {
        Some(flag) => {
            let variable = format!("{prefix}{}", flag.to_uppercase().replace('-', "_"));
            argument.env(variable)
        }
        None => argument,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_flags_have_variables() {
        let variable = |argument| {
            let argument = env_with_prefix("OVFLEET_ROUTER_")(argument);
            argument.get_env().map(|name| name.to_string_lossy().into_owned())
        };
        let flag = Arg::new("id").long("max-body-bytes");
        assert_eq!(variable(flag).as_deref(), Some("OVFLEET_ROUTER_MAX_BODY_BYTES"));
        assert_eq!(variable(Arg::new("positional")), None);
    }
}
