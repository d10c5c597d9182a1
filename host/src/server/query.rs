//! Query parameters, read strictly: a misspelled one would do to all backends what was meant for one.

use super::error::ApiError;

/// The values of the parameters `known`, in that order.
pub(super) fn read_query<const N: usize>(
    query: Option<&str>,
    known: [&'static str; N],
) -> Result<[Option<String>; N], ApiError> {
    let mut values = [const { None }; N];
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name = decode(name).ok_or_else(|| ApiError::bad_request("a query parameter's name is not UTF-8"))?;
        let Some(index) = known.iter().position(|known| *known == name) else {
            let shown: String = name.chars().take(40).collect();
            let message = match known.is_empty() {
                true => format!("unknown parameter {shown:?}; there are none here"),
                false => format!("unknown parameter {shown:?}; there are: {}", known.join(", ")),
            };
            return Err(ApiError::bad_request(message));
        };
        let value = decode(value).ok_or_else(|| ApiError::field(known[index], "is not UTF-8"))?;
        if values[index].replace(value).is_some() {
            return Err(ApiError::field(known[index], "is given twice"));
        }
    }
    Ok(values)
}

/// Undoes the percent-encoding of a form. None when the bytes are no UTF-8.
fn decode(text: &str) -> Option<String> {
    let text = text.replace('+', " ");
    percent_encoding::percent_decode_str(&text).decode_utf8().ok().map(|text| text.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 2] = ["backend", "force"];

    #[test]
    fn a_misspelled_parameter_was_passed_over_and_all_backends_were_meant() {
        let error = read_query(Some("backnd=near"), KNOWN).unwrap_err();
        assert!(error.message.contains("unknown parameter \"backnd\"; there are: backend, force"), "{}", error.message);
        assert!(read_query(Some("backend=a&backend=b"), KNOWN).unwrap_err().message.contains("twice"));
    }

    #[test]
    fn where_no_parameter_is_known_any_was_passed_over() {
        let error = read_query(Some("x=1"), []).unwrap_err();
        assert!(error.message.contains("unknown parameter \"x\"; there are none here"), "{}", error.message);
        assert!(read_query(None, []).is_ok() && read_query(Some(""), []).is_ok());
    }

    #[test]
    fn bytes_that_are_no_utf8_became_replacement_characters() {
        let error = read_query(Some("backend=%ff"), KNOWN).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("backend"));
        assert!(read_query(Some("%ff=1"), KNOWN).is_err());
    }

    #[test]
    fn known_parameters_are_decoded() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(read_query(Some("force&backend=n%65ar+1"), KNOWN).unwrap(), [some("near 1"), some("")]);
        assert_eq!(read_query(None, KNOWN).unwrap(), [None, None]);
    }
}
