"""Objects that hold the mandate, each behind `store.MandateStore`."""
