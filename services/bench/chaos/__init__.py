"""A whole engine of real processes under seeded deaths, stops and cuts, with clients that know what they should get."""
