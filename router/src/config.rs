//! The configuration file. Its keys are the names of command-line flags, and the same code parses the values from both
//! sources, so that a value has the same meaning and causes the same errors in both.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use serde_yaml::Value;

use crate::args::Args;

/// Size of a configuration file or a file of API keys.
///
/// If exceeded: the router does not start; if the file changes while the router runs, the previous version remains in
/// effect.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The reason why a configuration file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("failed to read {path}")]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error that occurred.
        #[source]
        source: io::Error,
    },
    /// The file is not valid YAML.
    #[error("failed to parse {path}")]
    Parse {
        /// The path of the file.
        path: PathBuf,
        /// The syntax error in the file.
        #[source]
        source: serde_yaml::Error,
    },
    /// The file is not a mapping, a key is not a flag or is only allowed on the command line, or a value is invalid.
    #[error("{path}: {problem}")]
    Option {
        /// The path of the file.
        path: PathBuf,
        /// A description of the error.
        problem: String,
    },
}

/// The arguments of the process. They are combined with the configuration file each time the file is read.
#[derive(Clone, Debug)]
pub struct CommandLine(Vec<OsString>);

impl CommandLine {
    /// Creates the command line from the arguments, the first of which is the name of the program.
    pub fn new(arguments: impl IntoIterator<Item = OsString>) -> Self {
        Self(arguments.into_iter().collect())
    }

    /// Parses the arguments without the file. If the arguments are invalid or request the help or the version, this
    /// function prints a message and exits the process.
    #[must_use]
    pub fn parse(&self) -> Args {
        Args::parse_from(&self.0)
    }

    /// Parses the arguments together with `text`, the content of the configuration file at `path`.
    ///
    /// # Errors
    /// The file is invalid. (The arguments themselves are valid, because [`Self::parse`] has accepted them.)
    pub fn with_file(&self, path: &Path, text: &str) -> Result<Args, Error> {
        let options = options(path, text)?;
        let program = self.0.iter().take(1).cloned();
        // The last value of a flag takes effect, so the command line overrides the file. The values of a repeatable
        // flag, such as --replica, are combined instead.
        let all = program.chain(options).chain(self.0.iter().skip(1).cloned());
        Args::try_parse_from(all).map_err(|error| Error::Option {
            path: path.to_owned(),
            problem: in_one_line(&error.to_string()),
        })
    }
}

/// Reads the file at `path`.
///
/// # Errors
/// The file cannot be read, is too large, or is not UTF-8.
pub fn read(path: &Path) -> Result<String, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    let size = std::fs::metadata(path).map_err(failed)?.len();
    if size > FILE_BYTES_MAX {
        return Err(failed(io::Error::other(format!("the file is larger than {FILE_BYTES_MAX} bytes"))));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// The content of the file as arguments of the command line.
fn options(path: &Path, text: &str) -> Result<Vec<OsString>, Error> {
    let wrong = |problem: String| Error::Option { path: path.to_owned(), problem };
    let document: Value =
        serde_yaml::from_str(text).map_err(|source| Error::Parse { path: path.to_owned(), source })?;
    let members = match document {
        Value::Null => return Ok(Vec::new()),
        Value::Mapping(members) => members,
        _ => return Err(wrong("the file is not a mapping of flags to values".to_owned())),
    };
    let mut options = Vec::new();
    for (key, value) in &members {
        let Value::String(key) = key else {
            return Err(wrong(format!("the key {key:?} is not a flag: keys must be strings")));
        };
        if key == "config" || key == "help" || key == "version" {
            return Err(wrong(format!("{key} is only allowed on the command line")));
        }
        let values = match value {
            Value::Sequence(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        };
        for value in values {
            match scalar(value) {
                Some(Scalar::Text(text)) => options.push(format!("--{key}={text}").into()),
                Some(Scalar::Set) => options.push(format!("--{key}").into()),
                Some(Scalar::Unset) => {}
                None => {
                    let allowed = "a string, a number, a boolean, or a list of these";
                    return Err(wrong(format!("the value of {key} must be {allowed}")));
                }
            }
        }
    }
    Ok(options)
}

enum Scalar {
    Text(String),
    Set,
    Unset,
}

fn scalar(value: &Value) -> Option<Scalar> {
    Some(match value {
        Value::String(text) => Scalar::Text(text.clone()),
        Value::Number(number) => Scalar::Text(number.to_string()),
        Value::Bool(true) => Scalar::Set,
        Value::Bool(false) | Value::Null => Scalar::Unset,
        _ => return None,
    })
}

/// Formats an error message of clap in one line, including the allowed values and tips. Omits the usage of the command
/// line and the reference to its help, which do not apply to a file.
fn in_one_line(message: &str) -> String {
    let describes_command_line =
        |paragraph: &&str| paragraph.starts_with("Usage:") || paragraph.starts_with("For more information");
    let paragraphs = message.split("\n\n").filter(|paragraph| !describes_command_line(paragraph));
    let joined = |paragraph: &str| paragraph.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let line = paragraphs.map(joined).collect::<Vec<_>>().join("; ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn with_file(arguments: &[&str], text: &str) -> Result<Args, String> {
        let line = CommandLine::new(["router"].iter().chain(arguments).map(OsString::from));
        line.with_file(Path::new("router.yaml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_are_flags_and_the_command_line_overrides_the_file() {
        let text = "
policy: round-robin
idle-timeout: 90s
attempts: 2
access-log: true
replica: [127.0.0.1:1/2, 127.0.0.1:3]
# This sets nothing.
tokens-per-minute:
";
        let args = with_file(&["--attempts", "3"], text).unwrap();
        assert_eq!((args.policy.name(), args.attempts, args.access_log), ("round-robin", 3, true));
        assert_eq!((args.idle_timeout, args.tokens_per_minute), (Duration::from_secs(90), None));
        assert_eq!(args.replicas.len(), 2);
        assert!(with_file(&[], "").is_ok());
    }

    #[test]
    fn errors_name_the_file_and_the_key() {
        for (text, said) in [
            ("polcy: kv", "'--polcy' found; tip: a similar argument exists: '--policy'"),
            ("policy: best", "best"),
            ("key-isolation: best", "[possible values: "),
            ("attempts: 0", "attempts"),
            ("attempts: [1, {a: 2}]", "attempts"),
            ("config: other.yaml", "config"),
            ("- policy", "mapping"),
            ("policy: [", "router.yaml"),
            ("1: 2", "not a flag"),
        ] {
            let error = with_file(&[], text).unwrap_err();
            assert!(error.contains(said) && error.contains("router.yaml"), "{text}: {error}");
            assert!(
                !error.contains('\n') && !error.contains("Usage") && !error.contains("--help"),
                "{error}"
            );
        }
    }
}
