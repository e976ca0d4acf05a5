"""`diloco data prepare`: files of text, JSON lines and Parquet become packed rows."""
