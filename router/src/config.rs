//! The configuration file: its keys are the options of the command line, and it is read by the same code, so
//! that a value means the same in both and is refused for the same reasons.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use serde_yaml::Value;

use crate::args::Args;

/// Size of a configuration file or a file of API keys.
///
/// Beyond it: the router does not start; if the file changes while the router runs, the previous version stays in
/// effect.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a configuration is not used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("failed to read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is no YAML.
    #[error("failed to parse {path}")]
    Parse {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_yaml::Error,
    },
    /// A key or a value is not what an option takes.
    #[error("{path}: {problem}")]
    Option {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// The command line as it was given, to be put together with the file each time that is read.
#[derive(Clone, Debug)]
pub struct CommandLine(Vec<OsString>);

impl CommandLine {
    /// Takes the arguments, the program's name first.
    pub fn new(arguments: impl IntoIterator<Item = OsString>) -> Self {
        Self(arguments.into_iter().collect())
    }

    /// The options without the file. Ends the process, with what is to be said, if they are not understood or
    /// ask for help.
    #[must_use]
    pub fn parse(&self) -> Args {
        Args::parse_from(&self.0)
    }

    /// The options with those of the file, `text` at `path`.
    ///
    /// # Errors
    /// The file makes no sense. (The command line does, or the process had ended.)
    pub fn with_file(&self, path: &Path, text: &str) -> Result<Args, Error> {
        let options = options(path, text)?;
        let program = self.0.iter().take(1).cloned();
        // Of options given twice the later counts: the command line.
        let all = program.chain(options).chain(self.0.iter().skip(1).cloned());
        Args::try_parse_from(all)
            .map_err(|error| Error::Option { path: path.to_owned(), problem: first_line(&error.to_string()) })
    }
}

/// Reads the file at `path`.
///
/// # Errors
/// It is not there, too large, or no text.
pub fn read(path: &Path) -> Result<String, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    let size = std::fs::metadata(path).map_err(failed)?.len();
    if size > FILE_BYTES_MAX {
        return Err(failed(io::Error::other(format!("it has {size} bytes, {FILE_BYTES_MAX} at most"))));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// The file as command-line options.
fn options(path: &Path, text: &str) -> Result<Vec<OsString>, Error> {
    let wrong = |problem: String| Error::Option { path: path.to_owned(), problem };
    let document: Value =
        serde_yaml::from_str(text).map_err(|source| Error::Parse { path: path.to_owned(), source })?;
    let members = match document {
        Value::Null => return Ok(Vec::new()),
        Value::Mapping(members) => members,
        _ => return Err(wrong("it is no mapping of options to values".to_owned())),
    };
    let mut options = Vec::new();
    for (key, value) in &members {
        let Value::String(key) = key else { return Err(wrong(format!("{key:?} is no option"))) };
        if key == "config" || key == "help" || key == "version" {
            return Err(wrong(format!("{key} is for the command line only")));
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
                None => return Err(wrong(format!("the value of {key} is neither text nor a number"))),
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

fn first_line(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
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
    fn keys_are_options_and_the_command_line_counts_before_the_file() {
        let text = "
policy: round-robin
idle-timeout: 90s
attempts: 2
access-log: true
replica: [127.0.0.1:1/2, 127.0.0.1:3]
# Nothing is said of these.
key-tokens:
";
        let args = with_file(&["--attempts", "3"], text).unwrap();
        assert_eq!((args.policy.name(), args.attempts, args.access_log), ("round-robin", 3, true));
        assert_eq!((args.idle_timeout, args.key_tokens), (Duration::from_secs(90), None));
        assert_eq!(args.replicas.len(), 2);
        assert!(with_file(&[], "").is_ok());
    }

    #[test]
    fn what_is_wrong_is_said_with_the_file_and_the_key() {
        for (text, said) in [
            ("polcy: kv", "--polcy"),
            ("policy: best", "best"),
            ("attempts: 0", "attempts"),
            ("attempts: [1, {a: 2}]", "attempts"),
            ("config: other.yaml", "config"),
            ("- policy", "mapping"),
            ("policy: [", "router.yaml"),
            ("1: 2", "no option"),
        ] {
            let error = with_file(&[], text).unwrap_err();
            assert!(error.contains(said) && error.contains("router.yaml"), "{text}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
