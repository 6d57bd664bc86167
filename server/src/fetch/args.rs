//! The flags of `ovfleet-server fetch`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};

/// Download and verify the files of a model.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("source").required(true).args(["hf_repo", "url", "s3_object"])))]
pub struct FetchArgs {
    /// The target directory. The symbolic link `current` in this directory points to the model once the fetch is
    /// complete.
    #[arg(long, value_name = "PATH")]
    pub into: PathBuf,

    /// Before fetching, remove those sibling directories of the target directory that contain earlier fetches.
    // Jobs that an earlier version of the operator created pass the alias.
    #[arg(long, alias = "remove-former")]
    pub remove_previous: bool,

    /// The name of a sibling directory that --remove-previous leaves unchanged. Repeatable.
    #[arg(long, value_name = "NAME")]
    pub keep: Vec<String>,

    /// A repository on the Hugging Face Hub: OWNER/NAME.
    #[arg(long, value_name = "NAME", help_heading = "Source")]
    pub hf_repo: Option<String>,

    /// The branch, tag or commit of the repository.
    #[arg(long, value_name = "NAME", default_value = "main", help_heading = "Source")]
    pub hf_revision: String,

    /// A file to fetch from the repository; `*` matches any number of characters. Repeatable. Default: all files whose
    /// paths do not begin with a dot.
    #[arg(long = "hf-file", value_name = "PATTERN", help_heading = "Source")]
    pub hf_files: Vec<String>,

    /// The URL of the Hugging Face Hub.
    #[arg(long, value_name = "URL", default_value = "https://huggingface.co", help_heading = "Source")]
    pub hf_endpoint: String,

    /// The URL of the file to fetch.
    #[arg(long, value_name = "URL", help_heading = "Source")]
    pub url: Option<String>,

    /// An S3 object (BUCKET/KEY), or all objects with a prefix (BUCKET/PREFIX/).
    #[arg(long, value_name = "OBJECT", help_heading = "Source")]
    pub s3_object: Option<String>,

    /// The region of the S3 service.
    #[arg(long, value_name = "NAME", default_value = "us-east-1", help_heading = "Source")]
    pub s3_region: String,

    /// The URL of the S3 service. Default: the AWS endpoint of the region.
    #[arg(long, value_name = "URL", help_heading = "Source")]
    pub s3_endpoint: Option<String>,

    /// The expected SHA-256 digest of the file, as 64 lowercase hexadecimal digits. The source must consist of a single
    /// file.
    #[arg(long, value_name = "DIGITS", help_heading = "Source")]
    pub sha256: Option<String>,

    /// The format of the files.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Source")]
    pub format: Format,

    /// A directory with one file per credential. For --hf-repo and --url, the files are `token`, or `username` and
    /// `password`. For --s3-object, the files are `accessKeyId`, `secretAccessKey` and, for temporary credentials,
    /// `sessionToken`.
    #[arg(long, value_name = "PATH", help_heading = "Source")]
    pub credentials: Option<PathBuf>,

    /// A file to which the result is written as JSON.
    #[arg(long, value_name = "PATH")]
    pub report: Option<PathBuf>,

    /// A port on which GET /progress returns the progress as JSON. The command listens on all addresses of this
    /// machine.
    #[arg(long, value_name = "PORT")]
    pub progress_port: Option<u16>,

    /// Maximum time in seconds that `ovfleet-server fetch` waits for data from the source.
    ///
    /// If exceeded: the attempt to list the files or to fetch a file fails (see `--attempts`).
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub idle_timeout: u64,

    /// Maximum number of consecutive failed attempts of `ovfleet-server fetch` to list the files or to download a file.
    /// An attempt that downloads a part of the file resets the count. Attempts that discard the downloaded part of a
    /// file are counted separately, with the same limit.
    ///
    /// If exceeded: the command fails with exit code 21 (the source is too slow) or 22 (the source cannot be reached or
    /// returns an error).
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub attempts: u32,
}

/// The format of a model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The format is detected from the file names.
    Auto,
    /// A GGUF file, or the parts of a split GGUF model.
    Gguf,
    /// A directory with openvino_model.xml or openvino_language_model.xml.
    #[value(name = "openvino-ir")]
    OpenvinoIr,
}
