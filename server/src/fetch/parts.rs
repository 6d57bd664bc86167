//! Determines the parts of split GGUF models from the paths of files in a source. The paths can contain directories.

use server_gguf::PartName;
use server_gguf::limits::PARTS_MAX;

use super::error::Error;

/// Returns the paths of all parts of the split model to which the file at `path` belongs, or only `path` if the file is
/// not a part.
///
/// # Errors
/// The model has too many parts.
pub(crate) fn all_parts(path: &str) -> Result<Vec<String>, Error> {
    Ok(match part(path)? {
        Some(name) => (1..=name.parts).map(|part| name.of_part(part)).collect(),
        None => vec![path.to_owned()],
    })
}

/// Returns the path of the first part of the split model to which the file at `path` belongs, or `None` if the file is
/// not a part.
pub(crate) fn first_part(path: &str) -> Option<String> {
    PartName::parse(path).map(|name| name.of_part(1))
}

/// Returns the path from which the model is loaded, if `paths` consists of one GGUF file or all parts of one split
/// model.
///
/// # Errors
/// A part is missing, or the model has too many parts.
pub(crate) fn model_path(paths: &[&str]) -> Result<Option<String>, Error> {
    let [first, others @ ..] = paths else { return Ok(None) };
    let Some(name) = part(first)? else {
        return Ok(others.is_empty().then(|| (*first).to_owned()));
    };
    if paths.iter().any(|path| first_part(path) != first_part(first)) {
        return Ok(None);
    }
    match all_parts(first)?.iter().find(|part| !paths.contains(&part.as_str())) {
        Some(missing) => Err(Error::Wrong(format!(
            "{missing} is not among the files to fetch: all {} parts of a split model are required",
            name.parts
        ))),
        None => Ok(Some(name.of_part(1))),
    }
}

fn part(path: &str) -> Result<Option<PartName<'_>>, Error> {
    match PartName::parse(path) {
        Some(name) if name.parts > PARTS_MAX => {
            Err(Error::Wrong(format!("{path:?} is one of {} parts (limit: {PARTS_MAX})", name.parts)))
        }
        name => Ok(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_or_all_parts_of_one_model_are_a_model() {
        let path = |paths: &[&str]| model_path(paths).map_err(|error| error.to_string());
        let first = Ok(Some("q4/a-00001-of-00002.gguf".to_owned()));
        assert_eq!(path(&["q4/a-00002-of-00002.gguf", "q4/a-00001-of-00002.gguf"]), first);
        assert_eq!(path(&["a.gguf"]), Ok(Some("a.gguf".to_owned())));
        assert_eq!(path(&["a-00001-of-00001.gguf"]), Ok(Some("a-00001-of-00001.gguf".to_owned())));
        for several in [
            &[][..],
            &["a.gguf", "b.gguf"],
            &["a.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
            &["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"],
            &["a-00001-of-00002.gguf", "b-00002-of-00002.gguf"],
            &["a-00001-of-00002.gguf", "a-00002-of-00003.gguf"],
        ] {
            assert_eq!(path(several), Ok(None), "{several:?}");
        }
        for part in ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"] {
            let error = path(&[part]).unwrap_err();
            assert!(error.contains("all 2 parts") && !error.contains(part), "{error}");
        }
        assert!(path(&["a-00001-of-99999.gguf"]).unwrap_err().contains("limit: 256"));
    }
}
