//! Formats and devices are written by their names.

/// A format by its name.
pub(crate) mod format_name {
    use qurl_kernels::Format;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(format.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Format, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Devices by their names.
pub(crate) mod device_name {
    use qurl_kernels::DeviceKind;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(device: &DeviceKind, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(device.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<DeviceKind, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
